"""Token Recycling: the target's own second choices as drafts (arXiv 2408.08696).

The rows of a `NeighbourTable` are followed from token to token; after every forward the rows of
all verified tokens, rejected ones too, are replaced by what the target thought after them.
Deviations: the tree is grown by reach, from how often each rank came true, instead of one fixed
template (`template=PAPER_LEVELS` has the paper's level sizes; which ranks fill a level is ours,
the smallest products of ranks); longer keys (see `neighbours.table`); the prompt's logits
are learned from, too; of tokens that occur twice in a tree the accepted one teaches, else the
likelier one; a text keeps what it teaches to itself unless `scope="global"`, which is the paper's.

Where the target is on an accelerator, a table of one-token keys is there as well, as in the paper
(`neighbours.device_table`): the target's best tokens never cross, and a draft takes one
copy to the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Literal

import torch

from ragspec.drafters.base import DraftContext, DraftRequest, Feedback, Prefill
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.retrievers.neighbours.device_table import DeviceNeighbourTable
from ragspec.retrievers.neighbours.rank_rates import RankRates
from ragspec.retrievers.neighbours.rows import NOTHING, Find, Place, Rows, Shape
from ragspec.retrievers.neighbours.table import LONGEST, NeighbourTable
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.trees.operations import keep_best

PAPER_LEVELS = (8, 21, 25, 15, 8, 3)

_FLOOR = 0.002
_LATE = 16  # steps without a draft that are learned together

Scope = Literal["request", "global"]
AnyTable = NeighbourTable | DeviceNeighbourTable


class NeighbourDrafter:
    """Drafts what the target held for likely after the same tokens before.

    table: what is known at the start: a `NeighbourTable` or a `DeviceNeighbourTable`, which stay
    where they are, or the folder of a saved one; None starts from nothing. Of these two, keys of
    single tokens come to where the target is and longer ones stay on the host; `drafter.table` is
    what has learned. k: neighbours per token where a new table is made. scope: "request" lets every
    text learn for itself, over the table; "global" lets all texts teach one table, which must then
    serve one party only: its drafts tell of other texts. template: sizes of the levels of a fixed
    tree, None grows trees by reach. reads_prompt: learn from the prompt too, for which the prefill
    works out the target's choice after each of its tokens. Raises InputError for another scope,
    StoreError for a table that cannot be read.
    """

    method = Method("the model's second choices", "Token Recycling", colour=2)
    name = "recycling"
    kind = DraftKind.DETERMINISTIC

    def __init__(
        self,
        table: AnyTable | Path | str | None = None,
        *,
        k: int = 8,
        orders: int = LONGEST,
        scope: Scope = "request",
        template: Sequence[int] | None = None,
        reads_prompt: bool = True,
    ) -> None:
        if scope not in ("request", "global"):
            raise InputError(f"got scope {scope!r}; expected 'request' or 'global'.")
        self._moves = table is None or isinstance(table, (str, Path))  # nobody else has it
        if isinstance(table, (str, Path)):
            table = NeighbourTable.open(table)
        self.table: AnyTable | None = table
        self.scope = scope
        self.orders = orders
        self.reads_prompt = reads_prompt
        self.top_logits = k if table is None else table.k
        self.template = None if template is None else _shape(template, self.top_logits)
        nodes = _widest(self.top_logits) if self.template is None else self.template
        self._shape = Shape(tuple(nodes), leaves=self.template is None)
        self._rates = RankRates(self.top_logits)

    @classmethod
    def paper(cls, table: AnyTable | Path | str | None = None) -> NeighbourDrafter:
        """Return the published method: one token as the key, one shared table, a fixed tree."""
        return cls(table, orders=1, scope="global", template=PAPER_LEVELS)

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Raise StoreError where the table was learned from another model or tokenizer."""
        if self.table is not None:
            expected = prints_of(model, tokenizer)
            check_prints("the neighbour table", self.table.fingerprints, expected)

    def open(self, request: DraftRequest) -> NeighbourSession:
        """Return a session; raises InputError where the table has another vocabulary."""
        table = self._table(request)
        if table.vocab_size != request.vocab_size:
            raise InputError(
                f"the neighbour table is for {table.vocab_size} tokens, the target has "
                f"{request.vocab_size}; open the table that was learned from this target."
            )
        if self.scope == "global":
            return NeighbourSession(table, self._rates, self.template, self._shape)
        return NeighbourSession(table.layer(), RankRates(table.k), self.template, self._shape)

    def _table(self, request: DraftRequest) -> AnyTable:
        """Return the table, made or brought to where the target is unless somebody gave it."""
        table = self.table
        selected = table is not None or self.scope == "global"
        if table is None:
            table = NeighbourTable(request.vocab_size, self.top_logits, orders=self.orders)
        if self._moves:
            table = _required_neighbours(table, request.device)
        if selected:
            self.table = table
        return table


class NeighbourSession:
    """What one text learns and drafts; see `NeighbourDrafter`."""

    def __init__(
        self,
        table: Rows,
        rates: RankRates,
        template: list[tuple[int, int]] | None,
        shape: Shape,
    ) -> None:
        self._table = table
        self._shape = shape
        self._rates = rates
        self._template = template
        self._place: Place | None = None
        # Steps without a draft are learned together, which takes less time, if only one text cares.
        self._untold: list[Step] = []
        self._patience = 1 if table.shared else _LATE

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` nodes of largest reach, or of the template."""
        self._catch_up()
        self._place = _last_place(context.tokens)
        deepest = context.remaining - 1
        if budget < 1 or deepest < 1:
            return DraftTree.empty()
        find = self._table.around(self._place[2], self._shape)
        if self._template is not None:
            return keep_best(self._filled(self._template, deepest, find), budget)
        return self._grown(budget, deepest, find)

    def expected_acceptance(self, context: DraftContext) -> float:
        """Return how likely the first of the row that is known here is."""
        place = _last_place(context.tokens)
        result = self._table.around(place[2], self._shape)(place)
        return 0.0 if result is None else self._rates.of(result, 0)[0]

    def observe(self, feedback: Feedback) -> None:
        """Learn from the prompt; from a step, some time later, how good the ranks are, and rows."""
        if isinstance(feedback, Prefill):
            if feedback.best is not None:
                self._table.learn_prompt(feedback.tokens, feedback.best)
            return
        message = Step(feedback.tree, feedback.path, feedback.tokens, best=feedback.best)
        self._untold.append(message)
        if len(message.tree) or len(self._untold) >= self._patience:
            self._catch_up()

    def _catch_up(self) -> None:
        for step in self._untold:
            self._learn_step(step)
        self._untold.clear()

    def _learn_step(self, step: Step) -> None:
        place = self._place
        if place is None:
            return
        places = [place]
        for parent, token in zip(
            step.tree.parents.tolist(), step.tree.tokens.tolist(), strict=True
        ):
            _, older, before = places[parent - ROOT]
            places.append((older, before, token))
        visited = [0, *(node - ROOT for node in step.path)]
        self._table.count([places[at] for at in visited], step.tokens, self._rates.learn)
        if step.best is not None:
            accepted = set(visited)
            # What is learned last, the accepted path, stays.
            order = [at for at in range(len(places) - 1, -1, -1) if at not in accepted]
            self._table.learn_step(places, order + visited, step.best)
        for token in step.tokens:
            place = (place[1], place[2], token)
        self._place = place

    def _grown(self, budget: int, deepest: int, find: Find) -> DraftTree:
        """Follow rows best-first: siblings one after the other, children below what was taken."""
        tokens: list[int] = []
        parents: list[int] = []
        accept_prob: list[float] = []
        places = [self._place or (NOTHING,) * 3]
        heap: list[tuple[float, int, int, int, int, float, list[int], list[float]]] = []
        number = count()
        rates = self._rates
        at, level, claim = ROOT, 1, 1.0
        while True:
            result = find(places[at - ROOT]) if level <= deepest else None
            if result is not None:
                row, chances = result.tokens, rates.of(result, level - 1)
                entry = (-claim * chances[0], next(number), at, level, 0, claim, row, chances)
                heappush(heap, entry)
            if not heap or len(tokens) == budget or heap[0][0] > -_FLOOR:
                break
            cost, _, parent, level, rank, above, row, chances = heappop(heap)
            token = row[rank]
            _, older, before = places[parent - ROOT]
            places.append((older, before, token))
            tokens.append(token)
            parents.append(parent)
            accept_prob.append(-cost)
            if rank + 1 < len(row):
                value = -above * chances[rank + 1]
                heappush(heap, (value, next(number), parent, level, rank + 1, above, row, chances))
            at, level, claim = len(tokens) - 1, level + 1, -cost
        return DraftTree.build(tokens, parents, NeighbourDrafter.name, accept_prob=accept_prob)

    def _filled(self, template: list[tuple[int, int]], deepest: int, find: Find) -> DraftTree:
        """Fill the fixed tree as far as rows are known."""
        tokens: list[int] = []
        parents: list[int] = []
        accept_prob: list[float] = []
        root = self._place or (NOTHING,) * 3
        # Of every node of the template that was filled: where it went, its place, level and row.
        filled = {ROOT: (ROOT, root, 0, 1.0, find(root))}
        for node, (parent, rank) in enumerate(template):
            if parent not in filled:
                continue
            above, place, level, claim, row = filled[parent]
            if row is None or rank >= len(row.tokens) or level >= deepest:
                continue
            token = row.tokens[rank]
            current = claim * self._rates.of(row, level)[rank]
            below = (place[1], place[2], token)
            filled[node] = (len(tokens), below, level + 1, current, find(below))
            tokens.append(token)
            parents.append(above)
            accept_prob.append(current)
        return DraftTree.build(tokens, parents, NeighbourDrafter.name, accept_prob=accept_prob)


def _required_neighbours(table: AnyTable, device: torch.device | None) -> AnyTable:
    """Return the table where the target is, if that is not the host and no key is longer."""
    if isinstance(table, DeviceNeighbourTable) or table.orders > 1:
        return table
    if device is None or device.type == "cpu":
        return table
    return DeviceNeighbourTable.of(table, device)


def _last_place(tokens: list[int]) -> Place:
    last = tokens[-3:]
    return (
        (NOTHING, NOTHING, last[0])
        if len(last) == 1
        else ((NOTHING, last[0], last[1]) if len(last) == 2 else (last[0], last[1], last[2]))
    )


def _shape(levels: Sequence[int], k: int) -> list[tuple[int, int]]:
    """Return (parent, rank) of every node of a tree whose levels have the given sizes.

    A level takes the nodes of smallest product of (rank + 1) over their paths. Raises InputError
    for sizes that k children a node cannot fill.
    """
    nodes: list[tuple[int, int]] = []
    above: list[tuple[int, int]] = [(1, ROOT)]
    for size in levels:
        offers = sorted(
            (weight * (rank + 1), parent, rank) for weight, parent in above for rank in range(k)
        )
        if not 1 <= size <= len(offers):
            raise InputError(
                f"got a template with {size} nodes in one level; expected 1 to {len(offers)}."
            )
        above = []
        for weight, parent, rank in offers[:size]:
            above.append((weight, len(nodes)))
            nodes.append((parent, rank))
    return nodes


def _widest(k: int) -> list[tuple[int, int]]:
    """Return the nodes whose rows a tree grown by reach may follow on a device: the paper's 80.

    Levels that k children a node cannot fill are as wide as they get.
    """
    sizes, width = list[int](), 1
    for size in PAPER_LEVELS:
        width = min(size, width * k)
        sizes.append(width)
    return _shape(sizes, k)


PAPER = Method(
    "the same, fixed tree",
    "Token Recycling",
    make=lambda sources: NeighbourDrafter.paper(),
)
