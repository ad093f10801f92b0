"""The draft tree of a step as a picture: the text of each token, and its cell in a grid.

The tree grows to the right and reads like text: its first child continues a node's row, and every
further child opens a row below. The accepted child comes first, then the one of largest acceptance
probability. So the top row is the accepted path and the target's token after it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from unicodedata import category

from ragspec.pipelines.page.run_view import TARGET, colours_of, first_number, where
from ragspec.reports.generation import accepted_of, sources_of
from ragspec.reports.trace import Trace
from ragspec.rules.base import Step

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


def draft_views(trace: Trace) -> list[DraftView]:
    """Return the picture of every step, first to last; none if nothing was drafted."""
    if not any(len(step.tree) for step in trace.steps):
        return []
    pictures, before, views = _Pictures(trace), "prompt", []
    steps = zip(trace.steps, trace.texts, strict=True)
    for number, (step, texts) in enumerate(steps, first_number(trace.steps)):
        views.append(pictures.view(step, number, before))
        before = next((text for text in reversed(texts) if text.strip()), before)
    return views


class _Pictures:
    """Draws the steps of a trace.

    Attributes:
        words: The texts of tokens by id, from the steps and the vocabulary.
        end: The end token that ended the text, None if the text ended otherwise. The last token of
            a run has a text, be it the mark of an unfinished character, unless decoding leaves it
            out.
    """

    def __init__(self, trace: Trace) -> None:
        self.documents = trace.documents
        self.colours = colours_of(trace.steps)
        self.words: dict[int, str] = {}
        for step, texts in zip(trace.steps, trace.texts, strict=True):
            self.words.update(zip(step.tokens, texts, strict=True))
        self.words.update(trace.vocabulary)
        ends = trace.report.finish_reason == "stop" and step.tokens and not texts[-1]
        self.end = step.tokens[-1] if ends else None

    def view(self, step: Step, number: int, before: str) -> DraftView:
        """Return the picture of a step after the text `before`."""
        tree, path, accepted = step.tree, step.path, len(accepted_of(step))
        added = step.tokens[len(path) :]  # by the target: one token, none after a stop
        # Box 0 is the root, box i + 1 is node i.
        parents = [-1, *(tree.parents + 1).tolist(), *(path[-1] + 1 if path else 0 for _ in added)]
        rank = [0.0, *(-tree.accept_prob).tolist(), *(-2.0 for _ in added)]
        for node in path:
            rank[node + 1] = -2.0
        cells = _cells(parents, rank)
        nodes = [
            Node(*cells[box], cells[max(parents[box], 0)][0], *look)
            for box, look in enumerate(self._looks(step, before, added))
        ]
        size = len(tree)
        caption = f"{size} drafted, {accepted} accepted" if size else "nothing drafted"
        ended = not added or added[0] == self.end
        caption += ", then the end" if ended else f", then “{self._text(added[0])}” by the target"
        return DraftView(number, accepted, caption, nodes, max(node.row for node in nodes))

    def _looks(self, step: Step, before: str, added: Sequence[int]) -> Iterator[tuple[str, ...]]:
        """Yield class, text and tooltip of the root, of the nodes, and of the target's tokens."""
        tree = step.tree
        yield "root", printed(before), "the text before this draft"
        drafted = zip(tree.tokens.tolist(), sources_of(step), strict=True)
        for node, (token, name) in enumerate(drafted):
            text, css, fate = self._text(token), self.colours[name], "not accepted"
            if node in step.path:
                css, fate = f"{css} kept", "accepted"
            origin = where(self.documents, tree.origin[node].tolist())
            claim = f"claimed reach {tree.accept_prob[node]:.2g}"
            yield css, text, f"“{text}” · {name}{origin}\n{claim} · {fate}"
        for text in map(self._text, added):
            yield "own", text, f"“{text}” · {TARGET}\nits own token after the accepted path"

    def _text(self, token: int) -> str:
        """Return the text of a token on one short line."""
        return END if token == self.end else printed(self.words.get(token) or f"#{token}")


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
