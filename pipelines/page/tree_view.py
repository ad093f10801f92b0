"""The draft tree of a step as a picture: the position and text of each token.

The tree grows to the right and reads like text: a node begins where its parent ends, its first
child continues the row, and every further child opens a row below. The accepted child comes first,
then the one of largest acceptance probability. So the top row is the accepted path and the target's
token after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil
from unicodedata import category, combining, east_asian_width

from ragspec.pipelines.page.charts import TARGET, colours_of, first_number
from ragspec.reports.generation import accepted_of, sources_of
from ragspec.reports.trace import Trace
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import PREDICTION, ROOT

CELL = 7.3  # width of a letter of the fixed-width font at 12 pixels
LETTERS = 16  # most letters of a token in its box
LINE = 80  # letters of a token in a tooltip
PAD, GAP, NODE_HEIGHT, ROW_HEIGHT, MARGIN = 6, 15, 22, 28, 4
BEND = 4  # radius
END = "end"  # text of the end token, which has none
HIDDEN, UNSEEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"}), "\ufffd"
MOST_LISTED = str.maketrans({" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"})


@dataclass(frozen=True, slots=True)
class Node:
    """A token of the picture: its box in pixels, CSS class, text and tooltip."""

    x: int
    y: int
    width: int
    css: str
    text: str
    tip: str

    @property
    def right(self) -> int:
        """The right edge of the box."""
        return self.x + self.width

    @property
    def middle(self) -> float:
        """The height at which edges meet the box."""
        return self.y + NODE_HEIGHT / 2 + 0.5  # on whole pixels a thin line would blur


@dataclass(frozen=True, slots=True)
class DraftView:
    """The picture of one step; `edges` and `path` are SVG paths, `path` of the accepted nodes."""

    number: int
    accepted: int
    caption: str
    nodes: list[Node]
    edges: str
    path: str
    width: int
    height: int
    node_height: int = NODE_HEIGHT
    pad: int = PAD


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
    first = [0, *(node + 1 for node in step.path), *range(len(tokens) + 1, len(parents))]
    rank = [0.0, *(-float(accept_prob) for accept_prob in tree.accept_prob), *(-2.0 for _ in added)]
    for box in first:
        rank[box] = -2.0
    labels = [printed(text) for text in (before, *texts)]
    nodes = _placed(parents, rank, labels, ["root", *css], ["the text before this draft", *tips])
    bold = set(first)
    return DraftView(
        number=number,
        accepted=len(accepted_of(step)),
        caption=_caption(step, [words[token] for token in added if token != words.end]),
        nodes=nodes,
        edges=_edges(nodes, parents, [i for i in range(1, len(nodes)) if i not in bold]),
        path=_edges(nodes, parents, first[1:]),
        width=max(node.right for node in nodes) + MARGIN,
        height=max(node.y for node in nodes) + NODE_HEIGHT + MARGIN,
    )


def _looks(
    trace: Trace, step: Step, texts: Sequence[str], colours: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Return the CSS classes and tooltips of the nodes, then of the target's tokens."""
    tree, path = step.tree, set(step.path)
    css, tips = [], []
    for node, name in enumerate(sources_of(step)):
        accepted = node in path
        css.append(f"{colours[name]} kept" if accepted else colours[name])
        origin = where(trace.header.documents, tree.origin[node].tolist())
        accept_prob = f"{tree.accept_prob[node]:.2g}"
        fate = "accepted" if accepted else "not accepted"
        tips.append(
            f"“{printed(texts[node], LINE)}” · {name}{origin}\nclaimed reach {accept_prob} · {fate}"
        )
    for text in texts[len(tree) :]:
        css.append("own")
        tips.append(f"“{printed(text, LINE)}” · {TARGET}\nits own token after the accepted path")
    return css, tips


def _caption(step: Step, added: Sequence[str]) -> str:
    accepted = len(accepted_of(step))
    drafted = (
        f"{len(step.tree)} drafted, {accepted} accepted" if len(step.tree) else "nothing drafted"
    )
    return drafted + (f", then “{printed(added[0])}” by the target" if added else ", then the end")


def printed(text: str, most: int = LETTERS) -> str:
    """Return a token's text on one short line, with visible spaces and control characters."""
    characters = [UNSEEN if category(c) in HIDDEN else c for c in text.translate(MOST_LISTED)]
    ends = list(accumulate(map(_cells, characters)))
    if not ends or ends[-1] <= most:
        return "".join(characters)
    return "".join(c for c, end in zip(characters, ends, strict=True) if end <= 3 * most // 4) + "…"


def _cells(letter: str) -> int:
    return 0 if combining(letter) else 2 if east_asian_width(letter) in "WF" else 1


def _placed(
    parents: Sequence[int],
    rank: Sequence[float],
    labels: Sequence[str],
    css: Sequence[str],
    tips: Sequence[str],
) -> list[Node]:
    """Return the boxes; children of one parent are in order of rank."""
    widths = [ceil(max(sum(map(_cells, text)), 1) * CELL) + 2 * PAD for text in labels]
    nodes: dict[int, Node] = {}
    for box, row in _rows(parents, rank):
        x = nodes[parents[box]].right + GAP if box else MARGIN
        y = MARGIN + row * ROW_HEIGHT
        nodes[box] = Node(x, y, widths[box], css[box], labels[box], tips[box])
    return [nodes[box] for box in range(len(parents))]


def _rows(parents: Sequence[int], rank: Sequence[float]) -> Iterator[tuple[int, int]]:
    """Yield every box, parents before children, with its row."""
    children: dict[int, list[int]] = {}
    for box in range(1, len(parents)):
        children.setdefault(parents[box], []).append(box)
    row, waiting = -1, [(0, True)]
    while waiting:
        box, opens = waiting.pop()
        row += opens
        yield box, row
        ordered = sorted(children.get(box, ()), key=lambda each: (rank[each], each))
        waiting.extend((child, i > 0) for i, child in reversed(list(enumerate(ordered))))


def _edges(nodes: Sequence[Node], parents: Sequence[int], boxes: Sequence[int]) -> str:
    """Return the lines from the parents to these boxes; lines to lower rows share a trunk."""
    lines = []
    trunks: dict[int, float] = {}  # by parent, how far down its trunk is drawn
    for box in sorted(boxes, key=lambda each: nodes[each].y):
        start, end, bend = nodes[parents[box]], nodes[box], nodes[parents[box]].right + GAP / 2
        line = f"M{start.right:g} {start.middle:g}"
        if end.y > start.y:
            if parents[box] in trunks:
                line = f"M{bend:g} {trunks[parents[box]]:g}"
            else:
                line += f"H{bend - BEND:g}q{BEND} 0 {BEND} {BEND}"
            trunks[parents[box]] = end.middle - BEND
            line += f"V{end.middle - BEND:g}q0 {BEND} {BEND} {BEND}"
        lines.append(f"{line}H{end.x:g}")
    return "".join(lines)
