"""Token Recycling: the target's own second choices as drafts (arXiv 2408.08696).

The draft follows the rows of a `NeighbourTable` from token to token. After every forward the rows
of all verified tokens, rejected ones too, are replaced by the target's best tokens after them.
Deviations: the tree is grown by the acceptance rate of each rank instead of a fixed template; keys
are longer (see `neighbours.table`); the prompt's logits are learned too; if a token occurs twice in
a tree, the accepted one is learned, else the likelier one; each text has a table of its own, unless
one is shared as in the paper.
"""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import count

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Prefill
from ragspec.drafters.method import Method
from ragspec.needs import Needs
from ragspec.retrievers.neighbours.table import LONGEST, NOTHING, NeighbourTable, Place, RankRates
from ragspec.rules.base import Step
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import ROOT, DraftTree

_FLOOR = 0.002
_LATE = 16  # steps without a draft that are learned together


class NeighbourDrafter(Drafter):
    """Drafts the tokens that the target ranked best after the same tokens earlier.

    Args:
        table: A table that all texts share. Its drafts reveal other texts, so it must serve one
            party only. None gives every text its own table.
        k: Neighbours per token of a text's own table.
        orders: Longest key of a text's own table, in tokens.
        reads_prompt: Learn from the prompt too; the prefill then ranks tokens at each position.
    """

    method = Method("the model's second choices", "Token Recycling", colour=2)
    name = "recycling"

    def __init__(
        self,
        table: NeighbourTable | None = None,
        *,
        k: int = 8,
        orders: int = LONGEST,
        reads_prompt: bool = True,
    ) -> None:
        self.table = table
        self.orders = orders
        self.needs = Needs(k if table is None else table.k, prompt_top_tokens=reads_prompt)
        self._rates = RankRates(self.needs.top_tokens)

    def open(self, request: DraftRequest) -> NeighbourSession:
        """Return a session over the shared table, or over the text's own one."""
        if self.table is not None:
            return NeighbourSession(self.table, self._rates, patience=1)
        k = min(self.needs.top_tokens, request.vocab_size)
        table = NeighbourTable(k, orders=self.orders)
        return NeighbourSession(table, RankRates(k), patience=_LATE)


class NeighbourSession(DraftSession):
    """The learning and drafting of one text; see `NeighbourDrafter`."""

    def __init__(self, table: NeighbourTable, rates: RankRates, patience: int) -> None:
        self._table = table
        self._rates = rates
        self._place: Place | None = None
        # With a table of its own, steps without a draft are learned together, which is faster.
        self._pending: list[Step] = []
        self._patience = patience

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` likeliest nodes."""
        self._catch_up()
        self._place = _last_place(context.tokens)
        deepest = context.remaining - 1
        if budget < 1 or deepest < 1:
            return DraftTree.empty()
        return self._grown(budget, deepest)

    def expected_acceptance(self, context: DraftContext) -> float:
        """Return the acceptance rate of the best token of the row after the last tokens."""
        row = self._table.find(_last_place(context.tokens))
        return 0.0 if row is None else self._rates.of(row, 0)[0]

    def observe_prefill(self, prefill: Prefill) -> None:
        """Learn rows from the prompt."""
        if prefill.best is not None:
            self._table.learn_text(prefill.tokens.tolist(), self._rows(prefill.best))

    def observe(self, step: Step) -> None:
        """Learn rows and rates from a step, possibly later."""
        self._pending.append(Step(step.tree, step.path, step.tokens, best=step.best))
        if len(step.tree) or len(self._pending) >= self._patience:
            self._catch_up()

    def _rows(self, best: TopTokens) -> list[list[int]]:
        """Return the rows of the table that the target's best tokens make."""
        rows: list[list[int]] = best.host()[:, : self._table.k].tolist()
        return rows

    def _catch_up(self) -> None:
        for step in self._pending:
            self._learn_step(step)
        self._pending.clear()

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
            # The accepted path is learned last, so it overwrites the other nodes.
            order = [at for at in range(len(places) - 1, -1, -1) if at not in accepted]
            rows = self._rows(step.best)
            for at in order + visited:
                self._table.learn(places[at], rows[at])
        for token in step.tokens:
            place = (place[1], place[2], token)
        self._place = place

    def _grown(self, budget: int, deepest: int) -> DraftTree:
        """Follow the rows best first: a taken node adds its next sibling and its first child."""
        tokens: list[int] = []
        parents: list[int] = []
        accept_prob: list[float] = []
        places = [self._place or (NOTHING,) * 3]
        heap: list[tuple[float, int, int, int, int, float, list[int], list[float]]] = []
        number = count()
        rates = self._rates
        at, level, claim = ROOT, 1, 1.0
        while True:
            best = self._table.find(places[at - ROOT]) if level <= deepest else None
            if best is not None:
                row, chances = best.tokens, rates.of(best, level - 1)
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


def _last_place(tokens: list[int]) -> Place:
    older, before, last = ([NOTHING, NOTHING, *tokens[-3:]])[-3:]
    return older, before, last
