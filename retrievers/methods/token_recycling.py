"""Token Recycling: the target's own second choices as drafts (arXiv 2408.08696).

A `NeighbourTable` is the adjacency matrix of section 3. The draft follows its rows from token to
token. After every forward the rows of all verified tokens, rejected ones too, are replaced by the
target's best tokens after them. Deviations:
- Rows that were never learned are empty, not zero, so token 0 is not drafted without evidence.
- The one or two tokens before may be part of the key, and the longest known key counts.
- Each row counts how often its best token was confirmed, which separates reliable rows from others.
- The tree is grown by a probability for each rank instead of a fixed template.
- The prompt's logits are learned too.
- If a token occurs twice in a tree, the accepted one is learned, else the likelier one.
- The texts of one owner share a table, not all texts. A text that drafts may change has its own.
"""

from collections.abc import Callable, Iterable
from functools import cache
from heapq import heappop, heappush
from itertools import count
from threading import Lock
from typing import NamedTuple, cast

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Prefill
from ragspec.drafters.method import Method
from ragspec.errors import InputError
from ragspec.needs import Needs
from ragspec.rules.base import Step
from ragspec.sampling.settings import checked_count
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import ROOT, DraftTree

LONGEST = 3
MOST_ROWS = 1 << 16
MOST_TABLES = 16  # of full ones each takes some 20 MB
NOTHING = -1
SUREST = 4

# Probability of a row's best token, by length of the key and by how often it was confirmed, and the
# shares of the other ranks in the rest. Measured on small Llama models.
FIRST = ((0.22, 0.3, 0.4, 0.45, 0.5), (0.3, 0.45, 0.65, 0.7, 0.75), (0.47, 0.73, 0.85, 0.93, 0.96))
OTHERS = (0.16, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
_FLOOR = 0.002
_LATE = 8  # steps without a draft that are learned together, which is faster

Place = tuple[int, int, int]  # the last three tokens, the newest last; NOTHING if there are fewer


class NeighbourRow(NamedTuple):
    """The best tokens after a place, best first, and the chance of each."""

    tokens: list[int]
    chances: tuple[float, ...]


class NeighbourTable:
    """The k best next tokens after the last one to three tokens. Threads may share it.

    Args:
        k: Neighbours of a key.
        orders: Tokens of the longest key, 1 (the paper's) to 3.
        most: Most rows; the least recently learned are dropped first.

    Raises:
        InputError: A size is below 1, or `orders` is outside 1 to 3.
    """

    def __init__(self, k: int = 8, *, orders: int = LONGEST, most: int = MOST_ROWS) -> None:
        self.k = checked_count(k, "k")
        self.most = checked_count(most, "most")
        self.orders = checked_count(orders, "orders")
        if self.orders > LONGEST:
            raise InputError(f"orders is {orders}; expected 1 to {LONGEST}.")
        # By key the best tokens, and how often in a row the first was confirmed, 0 to SUREST.
        self._rows: dict[tuple[int, ...], tuple[list[int], int]] = {}
        self._lock = Lock()

    def find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key at the end of the place, None without one."""
        for order in range(self.orders, 0, -1):
            if (row := self._rows.get(place[3 - order :])) is not None:
                return NeighbourRow(row[0], rank_rates(order, row[1], self.k))
        return None

    def learn(self, place: Place, best: list[int]) -> None:
        """Replace the rows of the place by the target's best tokens after it [k]."""
        with self._lock:
            for order in range(1, self.orders + 1):
                key = place[3 - order :]
                if key[0] == NOTHING:
                    return
                before, sure = self._rows.pop(key, None), 0
                if before is not None and before[0][0] == best[0]:
                    sure = min(before[1] + 1, SUREST)
                elif before is None and len(self._rows) >= self.most:
                    del self._rows[next(iter(self._rows))]
                self._rows[key] = best, sure

    def learn_text(self, tokens: Iterable[int], top: Iterable[list[int]]) -> None:
        """Learn from consecutive tokens [T] and the target's best ones after each [T, k]."""
        older, before = NOTHING, NOTHING
        for token, best in zip(tokens, top, strict=True):
            self.learn((older, before, token), best)
            older, before = before, token


@cache
def rank_rates(order: int, sure: int, k: int) -> tuple[float, ...]:
    """Return the probability of each rank of a row, decreasing [k].

    Args:
        order: Tokens of its key, 1 to 3.
        sure: How often in a row its best token was confirmed, 0 to 4.
    """
    first = FIRST[order - 1][sure]
    shares = (OTHERS[min(rank, len(OTHERS) - 1)] for rank in range(k - 1))
    return first, *((1.0 - first) * share for share in shares)


class NeighbourDrafter(Drafter):
    """Drafts the tokens that the target ranked best after the same tokens earlier.

    Args:
        table: A table that all texts share. Its drafts reveal other texts, so it must serve one
            party only. None gives every owner of texts a table; the one unused for longest goes.
        k: Neighbours per token of such a table.
        orders: Longest key of such a table, in tokens.
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
        self.table, self.orders = table, orders
        # By owner and vocabulary, the last used one last.
        self._tables: dict[tuple[str, int], NeighbourTable] = {}
        self.needs = Needs(k if table is None else table.k, prompt_top_tokens=reads_prompt)

    def open(self, request: DraftRequest) -> "NeighbourSession":
        """Return a session over a shared table, or over one of the text alone."""
        if self.table is not None:
            return NeighbourSession(self.table)
        k = min(self.needs.top_tokens, request.vocab_size)
        fresh, tables = NeighbourTable(k, orders=self.orders), self._tables
        if request.owner is None:
            return NeighbourSession(fresh)
        key = request.owner, request.vocab_size
        table = tables[key] = tables.pop(key, fresh)
        if len(tables) > MOST_TABLES:
            del tables[next(iter(tables))]
        return NeighbourSession(table)

    def __getstate__(self) -> dict[str, object]:
        """Copy and pickle what was configured, not what texts taught."""
        return {**vars(self), "_tables": {}}


class NeighbourSession(DraftSession):
    """The learning and drafting of one text; see `NeighbourDrafter`."""

    def __init__(self, table: NeighbourTable) -> None:
        self._table = table
        self._place: Place | None = None
        self._pending: list[Step] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` likeliest nodes."""
        self._catch_up()
        self._place = last_place(context.tokens)
        name = NeighbourDrafter.name
        return grow(self._table.find, self._place, budget, context.remaining - 1, name)

    def expected_acceptance(self, context: DraftContext) -> float:
        """Return the probability of the best token of the row after the last tokens."""
        row = self._table.find(last_place(context.tokens))
        return 0.0 if row is None else row.chances[0]

    def observe_prefill(self, prefill: Prefill) -> None:
        """Learn rows from the prompt."""
        if prefill.best is not None:
            self._table.learn_text(prefill.tokens.tolist(), self._rows(prefill.best))

    def observe(self, step: Step) -> None:
        """Learn rows from a step, possibly later."""
        self._pending.append(Step(step.tree, step.path, step.tokens, best=step.best))
        if len(step.tree) or len(self._pending) >= _LATE:
            self._catch_up()

    def _rows(self, best: TopTokens) -> list[list[int]]:
        """Return the rows of the table that the target's best tokens make."""
        return cast("list[list[int]]", best.host()[:, : self._table.k].tolist())

    def _catch_up(self) -> None:
        while self._pending and self._place is not None:
            self._learn_step(self._pending.pop(0), self._place)
        self._pending.clear()

    def _learn_step(self, step: Step, place: Place) -> None:
        places, tree = [place], step.tree
        for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
            _, older, before = places[parent - ROOT]
            places.append((older, before, token))
        visited = [0, *(node - ROOT for node in step.path)]
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


def grow(
    find: Callable[[Place], NeighbourRow | None],
    place: Place,
    budget: int,
    deepest: int,
    name: str,
    siblings: bool = True,
) -> DraftTree:
    """Follow rows; a node that is taken, best first, offers its next sibling and its first child.

    Args:
        place: The place of the root.
        budget, deepest: Most nodes, and most levels.
        siblings: Whether more than the best token after a place is drafted.
    """
    tokens, parents, accept_prob = list[int](), list[int](), list[float]()
    places = [place]
    heap: list[tuple[float, int, int, int, int, float, NeighbourRow]] = []
    number = count()
    at, level, claim = ROOT, 1, 1.0
    while len(tokens) < budget:
        best = find(places[at - ROOT]) if level <= deepest else None
        if best is not None:
            heappush(heap, (-claim * best.chances[0], next(number), at, level, 0, claim, best))
        if not heap or heap[0][0] > -_FLOOR:
            break
        cost, _, parent, level, rank, above, row = heappop(heap)
        token = row.tokens[rank]
        _, older, before = places[parent - ROOT]
        places.append((older, before, token))
        tokens.append(token)
        parents.append(parent)
        accept_prob.append(-cost)
        if siblings and rank + 1 < len(row.tokens):
            value = -above * row.chances[rank + 1]
            heappush(heap, (value, next(number), parent, level, rank + 1, above, row))
        at, level, claim = len(tokens) - 1, level + 1, -cost
    return DraftTree.build(tokens, parents, name, accept_prob=accept_prob)


def last_place(tokens: list[int]) -> Place:
    """Return the place after tokens."""
    older, before, last = ([NOTHING, NOTHING, *tokens[-3:]])[-3:]
    return older, before, last
