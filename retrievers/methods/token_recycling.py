"""Token Recycling: the target's own second choices as drafts (arXiv 2408.08696).

The rows of a `NeighbourTable` are followed from token to token; after every forward the rows of
all verified tokens, rejected ones too, are replaced by what the target thought after them.
Deviations: the tree is grown by reach, from how often each rank came true, instead of one fixed
template (`template=PAPER_LEVELS` has the paper's level sizes; which ranks fill a level is ours,
the smallest products of ranks); longer keys (see `neighbours.table`); the prompt's logits
are learned from, too; of tokens that occur twice in a tree the accepted one teaches, else the
likelier one; a text keeps what it teaches to itself unless `scope="global"`, which is the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Literal

from ragspec.drafters.base import DraftContext, DraftRequest, Feedback, Prefill
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.retrievers.fingerprints import check_prints, prints_of
from ragspec.retrievers.neighbours.table import (
    LONGEST,
    NOTHING,
    NeighbourRows,
    NeighbourTable,
    Place,
    RankRates,
)
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree
from ragspec.trees.operations import keep_best

PAPER_LEVELS = (8, 21, 25, 15, 8, 3)

_FLOOR = 0.002
_LATE = 16  # steps without a draft that are learned together

Scope = Literal["request", "global"]


class NeighbourDrafter:
    """Drafts the tokens that the target ranked best after the same tokens before.

    Args:
        table: What is known at the start: a `NeighbourTable`, or the folder of a saved one; None
            starts from nothing. `drafter.table` is what has learned.
        k: Neighbours per token of a new table.
        orders: Longest key of a new table, in tokens.
        scope: "request" lets every text learn for itself, over the table. "global" lets all texts
            teach one table, which must then serve one party: its drafts reveal other texts.
        template: Level sizes of a fixed tree; None grows trees by acceptance probability.
        reads_prompt: Learn from the prompt too; the prefill then ranks tokens at each position.

    Raises:
        InputError: The scope is another one.
        StoreError: The table cannot be read.
    """

    method = Method("the model's second choices", "Token Recycling", colour=2)
    name = "recycling"
    kind = DraftKind.DETERMINISTIC

    def __init__(
        self,
        table: NeighbourTable | Path | str | None = None,
        *,
        k: int = 8,
        orders: int = LONGEST,
        scope: Scope = "request",
        template: Sequence[int] | None = None,
        reads_prompt: bool = True,
    ) -> None:
        if scope not in ("request", "global"):
            raise InputError(f"got scope {scope!r}; expected 'request' or 'global'.")
        if isinstance(table, (str, Path)):
            table = NeighbourTable.open(table)
        self.table = table
        self.scope = scope
        self.orders = orders
        self.reads_prompt = reads_prompt
        self.top_logits = k if table is None else table.k
        self.template = None if template is None else _shape(template, self.top_logits)
        self._rates = RankRates(self.top_logits)

    @classmethod
    def paper(cls, table: NeighbourTable | Path | str | None = None) -> NeighbourDrafter:
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
            return NeighbourSession(table, self._rates, self.template)
        return NeighbourSession(table.layer(), RankRates(table.k), self.template)

    def _table(self, request: DraftRequest) -> NeighbourTable:
        """Return the table; a new one is kept only where all texts teach it."""
        if self.table is not None:
            return self.table
        table = NeighbourTable(request.vocab_size, self.top_logits, orders=self.orders)
        if self.scope == "global":
            self.table = table
        return table


class NeighbourSession:
    """What one text learns and drafts; see `NeighbourDrafter`."""

    def __init__(
        self, table: NeighbourRows, rates: RankRates, template: list[tuple[int, int]] | None
    ) -> None:
        self._table = table
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
        if self._template is not None:
            return keep_best(self._filled(self._template, deepest), budget)
        return self._grown(budget, deepest)

    def expected_acceptance(self, context: DraftContext) -> float:
        """Return how likely the first of the row that is known here is."""
        row = self._table.find(_last_place(context.tokens))
        return 0.0 if row is None else self._rates.of(row, 0)[0]

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
        for level, (at, token) in enumerate(zip(visited, step.tokens, strict=False)):
            row = self._table.find(places[at])
            if row is not None:
                self._rates.learn(row, level, token)
        if step.best is not None:
            accepted = set(visited)
            # What is learned last, the accepted path, stays.
            order = [at for at in range(len(places) - 1, -1, -1) if at not in accepted]
            self._table.learn_step(places, order + visited, step.best)
        for token in step.tokens:
            place = (place[1], place[2], token)
        self._place = place

    def _grown(self, budget: int, deepest: int) -> DraftTree:
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
            result = self._table.find(places[at - ROOT]) if level <= deepest else None
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

    def _filled(self, template: list[tuple[int, int]], deepest: int) -> DraftTree:
        """Fill the fixed tree as far as rows are known."""
        tokens: list[int] = []
        parents: list[int] = []
        accept_prob: list[float] = []
        root = self._place or (NOTHING,) * 3
        # Of every node of the template that was filled: where it went, its place, level and row.
        filled = {ROOT: (ROOT, root, 0, 1.0, self._table.find(root))}
        for node, (parent, rank) in enumerate(template):
            if parent not in filled:
                continue
            above, place, level, claim, row = filled[parent]
            if row is None or rank >= len(row.tokens) or level >= deepest:
                continue
            token = row.tokens[rank]
            current = claim * self._rates.of(row, level)[rank]
            below = (place[1], place[2], token)
            filled[node] = (len(tokens), below, level + 1, current, self._table.find(below))
            tokens.append(token)
            parents.append(above)
            accept_prob.append(current)
        return DraftTree.build(tokens, parents, NeighbourDrafter.name, accept_prob=accept_prob)


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


PAPER = Method(
    "the same, fixed tree", "Token Recycling", make=lambda sources: NeighbourDrafter.paper()
)
