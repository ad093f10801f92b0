"""Token Recycling: the target's own second choices as drafts (arXiv 2408.08696).

The rows of a `NeighbourTable` are followed from token to token; after every forward the rows of
all verified tokens, rejected ones too, are replaced by what the target thought after them.
Deviations: the tree is grown by reach, from how often each rank came true, instead of one fixed
template (`template=PAPER_LEVELS` has the paper's level sizes; which ranks fill a level is ours,
the smallest products of ranks); longer keys (see `neighbours`); the prompt's logits are learned
from, too; of tokens that occur twice in a tree the accepted one teaches, else the likelier one;
a text keeps what it teaches to itself unless `scope="global"`, which is the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path
from typing import Any, Literal

from ragspec.draft import ROOT, DraftContext, DraftKind, DraftRequest, DraftTree, Ints, Step
from ragspec.errors import InputError
from ragspec.retrievers.neighbours import (
    LONGEST,
    NOTHING,
    NeighbourLayer,
    NeighbourTable,
    Place,
    learn_text,
)
from ragspec.retrievers.provenance import check_prints, prints_of
from ragspec.retrievers.rank_rates import RankRates
from ragspec.tree import keep_best

PAPER_LEVELS = (8, 21, 25, 15, 8, 3)

_FLOOR = 0.002
_LATE = 16  # steps without a draft that are learned together

Scope = Literal["request", "global"]


class NeighbourDrafter:
    """Drafts what the target held for likely after the same tokens before.

    table: what is known at the start, a `NeighbourTable` or the folder of a saved one; None starts
    from nothing. k: neighbours per token where a new table is made. scope: "request" lets every
    text learn for itself, over the table; "global" lets all texts teach one table, which must then
    serve one party only: its drafts tell of other texts. template: sizes of the levels of a fixed
    tree, None grows trees by reach. reads_prompt: learn from the prompt too, for which the prefill
    works out the target's choice after each of its tokens. Raises InputError for another scope,
    StoreError for a table that cannot be read.
    """

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
        table = self.table
        if table is None:
            table = NeighbourTable(request.vocab_size, self.top_logits, orders=self.orders)
            if self.scope == "global":
                self.table = table
        if table.vocab_size != request.vocab_size:
            raise InputError(
                f"the neighbour table is for {table.vocab_size} tokens, the target has "
                f"{request.vocab_size}; open the table that was learned from this target."
            )
        if self.scope == "global":
            return NeighbourSession(table, self._rates, self.template)
        return NeighbourSession(NeighbourLayer(table), RankRates(table.k), self.template)


class NeighbourSession:
    """What one text learns and drafts; see `NeighbourDrafter`."""

    def __init__(
        self,
        table: NeighbourTable | NeighbourLayer,
        rates: RankRates,
        template: list[tuple[int, int]] | None,
    ) -> None:
        self._table = table
        self._rates = rates
        self._template = template
        self._place: Place | None = None
        # Steps without a draft are learned together, which takes less time, if only one text cares.
        self._untold: list[Step] = []
        self._patience = _LATE if isinstance(table, NeighbourLayer) else 1

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

    def outlook(self, context: DraftContext) -> float:
        """Return how likely the first of the row that is known here is."""
        found = self._table.find(_last_place(context.tokens))
        return 0.0 if found is None else self._rates.of(found, 0)[0]

    def observe_prompt(self, tokens: Ints, top: Ints) -> None:
        """Learn the best tokens i64 [T, k] after the prompt's tokens i64 [T]."""
        learn_text(self._table, tokens.tolist(), top[:, : self._table.k].tolist())

    def observe(self, step: Step) -> None:
        """Learn how good the ranks are, then the rows of all verified tokens; some time later."""
        self._untold.append(Step(step.tree, step.path, step.tokens, top=step.top))
        if len(step.tree) or len(self._untold) >= self._patience:
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
            found = self._table.find(places[at])
            if found is not None:
                self._rates.learn(found, level, token)
        self._learn(places, visited, step.top)
        for token in step.tokens:
            place = (place[1], place[2], token)
        self._place = place

    def rollback(self, n: int) -> None:
        """Forget where the text ended; what the target thinks of tokens stays true."""
        self._catch_up()
        self._place = None

    def _learn(self, places: list[Place], visited: list[int], top: Ints | None) -> None:
        """Replace the rows of the places; what is written last, the accepted path, stays."""
        if top is None:
            return
        best = top[:, : self._table.k].tolist()
        accepted = set(visited)
        for at in range(len(places) - 1, -1, -1):
            if at not in accepted:
                self._table.learn(places[at], best[at])
        for at in visited:
            self._table.learn(places[at], best[at])

    def _grown(self, budget: int, deepest: int) -> DraftTree:
        """Follow rows best-first: siblings one after the other, children below what was taken."""
        tokens: list[int] = []
        parents: list[int] = []
        reach: list[float] = []
        places = [self._place or (NOTHING,) * 3]
        heap: list[tuple[float, int, int, int, int, float, list[int], list[float]]] = []
        number = count()
        find, rates = self._table.find, self._rates
        at, level, claim = ROOT, 1, 1.0
        while True:
            found = find(places[at - ROOT]) if level <= deepest else None
            if found is not None:
                row, chances = found.tokens, rates.of(found, level - 1)
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
            reach.append(-cost)
            if rank + 1 < len(row):
                value = -above * chances[rank + 1]
                heappush(heap, (value, next(number), parent, level, rank + 1, above, row, chances))
            at, level, claim = len(tokens) - 1, level + 1, -cost
        return DraftTree.build(tokens, parents, NeighbourDrafter.name, reach=reach)

    def _filled(self, template: list[tuple[int, int]], deepest: int) -> DraftTree:
        """Fill the fixed tree as far as rows are known."""
        tokens: list[int] = []
        parents: list[int] = []
        reach: list[float] = []
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
            own = claim * self._rates.of(row, level)[rank]
            below = (place[1], place[2], token)
            filled[node] = (len(tokens), below, level + 1, own, self._table.find(below))
            tokens.append(token)
            parents.append(above)
            reach.append(own)
        return DraftTree.build(tokens, parents, NeighbourDrafter.name, reach=reach)


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
