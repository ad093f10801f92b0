"""What a neighbour table tells and is told, wherever it lives: the types that its forms share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import Ints

NOTHING = -1
SUREST = 4

Place = tuple[int, int, int]


class Neighbours(NamedTuple):
    """What is known after a token: the best tokens, best first.

    order: how many tokens the key had, 1 to 3. sure: how often in a row the best token was
    confirmed, 0 to 4.
    """

    tokens: list[int]
    order: int
    sure: int


Find = Callable[[Place], Neighbours | None]
Count = Callable[[Neighbours, int, int], None]


class Shape(NamedTuple):
    """Which rows a draft may follow below its root: those of the nodes of a tree.

    nodes: parent (-1 = root) and rank of each, parents first. leaves: whether the rows of nodes
    without children are wanted, too.
    """

    nodes: tuple[tuple[int, int], ...]
    leaves: bool


class Rows(Protocol):
    """What a drafting session asks of a table, wherever that is.

    shared: whether other texts see what is learned.
    """

    k: int
    shared: bool

    def around(self, root: int, shape: Shape) -> Find:
        """Return a look-up that knows at least the rows of a token and of a shape below it."""
        ...

    def count(self, places: Sequence[Place], tokens: Sequence[int], count: Count) -> None:
        """Tell `count` of each known row of places, its number and the token that came there.

        Not later than anything is looked up; the rows are those before what is learned next.
        """
        ...

    def learn_prompt(self, tokens: Ints, top_tokens: TopTokens) -> None:
        """Learn the best tokens after consecutive tokens i64 [T]."""
        ...

    def learn_step(
        self, places: Sequence[Place], order: Sequence[int], top_tokens: TopTokens
    ) -> None:
        """Learn the best tokens after the places, in that order of their numbers."""
        ...


class HostRows:
    """`Rows` of a table on the host: every row is looked up and learned when it is asked for."""

    k: int

    def find(self, place: Place) -> Neighbours | None:
        """Return the row of the longest key; see `NeighbourTable.find`."""
        raise NotImplementedError

    def learn(self, place: Place, best: list[int]) -> None:
        """Replace the rows of the place; see `NeighbourTable.learn`."""
        raise NotImplementedError

    def around(self, root: int, shape: Shape) -> Find:
        """Return the look-up of all rows."""
        return self.find

    def count(self, places: Sequence[Place], tokens: Sequence[int], count: Count) -> None:
        """Tell `count` of each known row at once; see `Rows.count`."""
        for level, (place, token) in enumerate(zip(places, tokens, strict=False)):
            result = self.find(place)
            if result is not None:
                count(result, level, token)

    def learn_prompt(self, tokens: Ints, top_tokens: TopTokens) -> None:
        """Learn the best tokens after consecutive tokens i64 [T]."""
        learn_text(self, tokens.tolist(), top_tokens.host()[:, : self.k].tolist())

    def learn_step(
        self, places: Sequence[Place], order: Sequence[int], top_tokens: TopTokens
    ) -> None:
        """Learn the best tokens after the places, in that order of their numbers."""
        best = top_tokens.host()[:, : self.k].tolist()
        for at in order:
            self.learn(places[at], best[at])


def learn_text(table: HostRows, tokens: Iterable[int], top: Iterable[list[int]]) -> None:
    """Teach a table consecutive tokens [T] and the target's best ones after each [T, k]."""
    older, before = NOTHING, NOTHING
    for token, best in zip(tokens, top, strict=True):
        table.learn((older, before, token), best)
        older, before = before, token
