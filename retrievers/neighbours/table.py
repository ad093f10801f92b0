"""The neighbour table: the target's best next tokens after every token, learned while decoding.

Token Recycling, arXiv 2408.08696, section 3: the adjacency matrix. Deviations:
- Rows that were never learned are empty, not zero, so token 0 is not drafted without evidence.
- The one or two tokens before may be part of the key, and the longest known key counts.
- Each row counts how often its best token was confirmed, which separates reliable rows from others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import Lock
from typing import NamedTuple

from ragspec.errors import InputError

LONGEST = 3
MOST_ROWS = 1 << 16
NOTHING = -1
SUREST = 4

# Probability of a row's best token, by length of the key and by how often it was confirmed, and the
# shares of the other ranks in the rest. Measured on small Llama models.
FIRST = ((0.22, 0.3, 0.4, 0.45, 0.5), (0.3, 0.45, 0.65, 0.7, 0.75), (0.47, 0.73, 0.85, 0.93, 0.96))
OTHERS = (0.16, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)
_PRIOR, _DECAY = 16.0, 0.99

Place = tuple[int, int, int]  # the last three tokens, the newest last; NOTHING if there are fewer


class NeighbourRow(NamedTuple):
    """The best tokens after a key, best first.

    Attributes:
        order: Number of tokens in the key, 1 to 3.
        sure: Number of times in a row that the best token was confirmed, 0 to 4.
    """

    tokens: list[int]
    order: int
    sure: int


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
        if k < 1 or not 1 <= orders <= LONGEST or most < 1:
            raise InputError(
                f"got k {k}, orders {orders}, most {most}; expected sizes of at least 1 and orders "
                f"from 1 to {LONGEST}."
            )
        self.k = k
        self.orders = orders
        self.most = most
        self._rows: dict[tuple[int, ...], NeighbourRow] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    def find(self, place: Place) -> NeighbourRow | None:
        """Return the row of the longest known key at the end of the place, None without one."""
        for order in range(self.orders, 0, -1):
            if (row := self._rows.get(place[3 - order :])) is not None:
                return row
        return None

    def learn(self, place: Place, best: list[int]) -> None:
        """Replace the rows of the place by the target's best tokens after it [k]."""
        with self._lock:
            for order in range(1, self.orders + 1):
                key = place[3 - order :]
                if key[0] == NOTHING:
                    return
                before, sure = self._rows.pop(key, None), 0
                if before is not None and before.tokens[0] == best[0]:
                    sure = min(before.sure + 1, SUREST)
                elif before is None and len(self._rows) >= self.most:
                    del self._rows[next(iter(self._rows))]
                self._rows[key] = NeighbourRow(best, order, sure)

    def learn_text(self, tokens: Iterable[int], top: Iterable[list[int]]) -> None:
        """Learn from consecutive tokens [T] and the target's best ones after each [T, k]."""
        older, before = NOTHING, NOTHING
        for token, best in zip(tokens, top, strict=True):
            self.learn((older, before, token), best)
            older, before = before, token


class RankRates:
    """The acceptance rate of each rank of a row, by key length, sureness and depth.

    All tokens that the target chose after a known row count, drafted or not, so the rates do not
    depend on the trees that were grown. Counts decay by 1 % with each observation.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._hits: dict[int, list[float]] = {}
        self._totals: dict[int, float] = {}
        self._rates: dict[int, list[float]] = {}

    def of(self, row: NeighbourRow, level: int) -> list[float]:
        """Return the probability of each rank, non-increasing [k]; level 0 is below the root."""
        key = _row_kind(row, level)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._estimate(row, key)
        return rates

    def learn(self, row: NeighbourRow, level: int, token: int) -> None:
        """Count the rank of the target's token in the row, if it has one."""
        key = _row_kind(row, level)
        hits = self._hits.setdefault(key, [0.0] * self.k)
        for rank in range(self.k):
            hits[rank] *= _DECAY
        self._totals[key] = self._totals.get(key, 0.0) * _DECAY + 1.0
        if token in row.tokens:
            hits[row.tokens.index(token)] += 1.0
        self._rates.pop(key, None)

    def _estimate(self, row: NeighbourRow, key: int) -> list[float]:
        hits = self._hits.get(key, [0.0] * self.k)
        weight = _PRIOR + self._totals.get(key, 0.0)
        first = FIRST[row.order - 1][row.sure]
        rates = [(_PRIOR * first + hits[0]) / weight]
        for rank in range(1, self.k):
            prior = (1.0 - first) * OTHERS[min(rank, len(OTHERS)) - 1]
            rates.append((_PRIOR * prior + hits[rank]) / weight)
        return isotonic(rates[::-1])[::-1]


def _row_kind(row: NeighbourRow, level: int) -> int:
    """Return the number of the counts that a row at a depth belongs to."""
    return (row.order * (SUREST + 1) + row.sure) * 2 + (level > 0)


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing sequence (pool adjacent violators): unbiased by noise."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean = (mean * count + before * size) / (count + size)
            count += size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
