"""The draft tree of a step as a picture: the text of each token, and its cell in a grid.

The tree grows to the right and reads like text: its first child continues a node's row, and every
further child opens a row below. The accepted child comes first,
then the one of largest acceptance probability. So the top row is the accepted path and the target's
token after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unicodedata import category

from ragspec.pipelines.page.charts import TARGET, colours_of, first_number
from ragspec.reports.generation import accepted_of, sources_of
from ragspec.reports.trace import Trace
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import PREDICTION, ROOT

LONGEST = 80  # letters of a token that are shown
END = "end"  # text of the end token, which has none
HIDDEN, UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"}), "\ufffd"
MOST_LISTED = str.maketrans({" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"})


@dataclass(frozen=True, slots=True)
class Node:
    """A token of the picture: its cell, the row of its parent, CSS class, text and tooltip."""

    row: int
    column: int
    above: int
    css: str
    text: str
    tip: str


@dataclass(frozen=True, slots=True)
class DraftView:
    """The picture of one step; nodes are in the order of the tree, after its root."""

    number: int
    accepted: int
    caption: str
    nodes: list[Node]
    rows: int


def where(names: Sequence[str], origin: Sequence[int], length: int = 1) -> str:
    """Return the document and tokens that drafted tokens were copied from, "" if unknown."""
    document, offset = origin
    to = f"–{offset + length - 1}" if length > 1 else ""
    if document == PREDICTION and offset >= 0:  # below 0 is the end of the prompt
        return f" · token {offset}{to}"
    if document < 0:
        return ""
    name = names[document] if document < len(names) else f"document {document}"
    return f" · {name}, token {offset}{to}"


def draft_views(trace: Trace) -> list[DraftView]:
    """Return the picture of every step, first to last; none if nothing was drafted."""
    if not any(len(step.tree) for step in trace.steps):
        return []
    colours, words = colours_of(trace.steps), _Words(trace)
    first = first_number(trace.steps)
    views = []
    before = "prompt"
    for number, (step, texts) in enumerate(zip(trace.steps, trace.texts, strict=True), first):
        views.append(_view(trace, step, number, before, colours, words))
        before = next((text for text in reversed(texts) if text.strip()), before)
    return views


class _Words:
    """The texts of tokens by id, from the steps and the vocabulary of a trace."""

    def __init__(self, trace: Trace) -> None:
        self._texts: dict[int, str] = {}
        for step, texts in zip(trace.steps, trace.texts, strict=True):
            self._texts.update(zip(step.tokens, texts, strict=True))
        self._texts.update(trace.vocabulary)
        self.end = _end_of(trace)

    def __getitem__(self, token: int) -> str:
        if token == self.end:
            return END
        return self._texts.get(token) or f"#{token}"


def _end_of(trace: Trace) -> int | None:
    """Return the end token that ended the text, None if the text ended otherwise.

    The last token of a run has a text, be it the mark of an unfinished character, unless
    decoding leaves it out.
    """
    if trace.report.finish_reason != "stop" or not trace.steps:
        return None
    last, texts = trace.steps[-1].tokens, trace.texts[-1]
    return last[-1] if last and not texts[-1] else None


def _view(
    trace: Trace, step: Step, number: int, before: str, colours: Mapping[str, str], words: _Words
) -> DraftView:
    tree = step.tree
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    added = step.tokens[len(step.path) :]  # the target's own: one token, none after a stop
    texts = [words[token] for token in (*tokens, *added)]
    parents += [step.path[-1] if step.path else ROOT] * len(added)
    css, tips = _looks(trace, step, texts, colours)
    # Box 0 is the root, box i + 1 is node i.
    parents = [-1, *(parent + 1 for parent in parents)]
    rank = [0.0, *(-float(accept_prob) for accept_prob in tree.accept_prob), *(-2.0 for _ in added)]
    for node in step.path:
        rank[node + 1] = -2.0
    cells = _cells(parents, rank)
    looks = zip(
        ["root", *css],
        map(printed, (before, *texts)),
        ["the text before this draft", *tips],
        strict=True,
    )
    nodes = [
        Node(*cells[box], cells[max(parents[box], 0)][0], *look) for box, look in enumerate(looks)
    ]
    written = [words[token] for token in added if token != words.end]
    caption, rows = _caption(step, written), max(node.row for node in nodes)
    return DraftView(number, len(accepted_of(step)), caption, nodes, rows)


def _looks(
    trace: Trace, step: Step, texts: Sequence[str], colours: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the CSS classes and tooltips of the nodes, then of the target's tokens."""
    tree, path = step.tree, set(step.path)
    css, tips = [], []
    for node, name in enumerate(sources_of(step)):
        accepted = node in path
        css.append(f"{colours[name]} kept" if accepted else colours[name])
        origin = where(trace.documents, tree.origin[node].tolist())
        accept_prob = f"{tree.accept_prob[node]:.2g}"
        fate = "accepted" if accepted else "not accepted"
        tips.append(
            f"“{printed(texts[node])}” · {name}{origin}\nclaimed reach {accept_prob} · {fate}"
        )
    for text in texts[len(tree) :]:
        css.append("own")
        tips.append(f"“{printed(text)}” · {TARGET}\nits own token after the accepted path")
    return css, tips


def _caption(step: Step, added: Sequence[str]) -> str:
    accepted = len(accepted_of(step))
    drafted = (
        f"{len(step.tree)} drafted, {accepted} accepted" if len(step.tree) else "nothing drafted"
    )
    return drafted + (f", then “{printed(added[0])}” by the target" if added else ", then the end")


def printed(text: str) -> str:
    """Return a token's text on one short line, with visible spaces and control characters."""
    line = "".join(UNSEEN if category(c) in HIDDEN else c for c in text.translate(MOST_LISTED))
    return line if len(line) <= LONGEST else line[: LONGEST - 1] + "…"


def _cells(parents: Sequence[int], rank: Sequence[float]) -> list[tuple[int, int]]:
    """Return row and column of every box, from 1; children of a box are in order of rank."""
    children: dict[int, list[int]] = {}
    for box in range(1, len(parents)):
        children.setdefault(parents[box], []).append(box)
    cells = [(0, 0)] * len(parents)
    row, waiting = 0, [(0, True)]
    while waiting:
        box, opens = waiting.pop()
        row += opens
        cells[box] = (row, cells[parents[box]][1] + 1 if box else 1)
        ordered = sorted(children.get(box, ()), key=lambda each: (rank[each], each))
        waiting.extend((child, i > 0) for i, child in reversed(list(enumerate(ordered))))
    return cells
