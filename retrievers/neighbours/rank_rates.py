"""How often the ranks of a neighbour row come true, learned as the target decides.

This is what makes a tree of second choices (see `token_recycling`) as wide or deep as it pays,
where Token Recycling (arXiv 2408.08696) has one template for all.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.retrievers.neighbours.table import SUREST, NeighbourRow

# How often the best token of a row comes true, by length of the key and by how often it was
# confirmed, and how the other ranks share what it leaves. Measured on small Llama models.
FIRST = ((0.22, 0.3, 0.4, 0.45, 0.5), (0.3, 0.45, 0.65, 0.7, 0.75), (0.47, 0.73, 0.85, 0.93, 0.96))
OTHERS = (0.16, 0.08, 0.05, 0.04, 0.03, 0.02, 0.02)

_PRIOR = 16.0
_DECAY = 0.99


class RankRates:
    """How often each rank of a row comes true, by key length, sureness and depth.

    Counts are of tokens that the target chose after rows that were known, drafted or not, so what
    is learned does not depend on which trees were grown. They decay by 1 % with each observation.
    """

    def __init__(self, k: int) -> None:
        self.k = k
        self._hits: dict[int, list[float]] = {}
        self._visible: dict[int, float] = {}
        self._rates: dict[int, list[float]] = {}

    def of(self, row: NeighbourRow, level: int) -> list[float]:
        """Return the probability of each rank, non-increasing [k]; level: 0 below the root."""
        key = _row_kind(row, level)
        rates = self._rates.get(key)
        if rates is None:
            rates = self._rates[key] = self._estimate(row, key)
        return rates

    def learn(self, row: NeighbourRow, level: int, token: int) -> None:
        """Count which rank of the row the target's token has, if any."""
        key = _row_kind(row, level)
        hits = self._hits.setdefault(key, [0.0] * self.k)
        for rank in range(self.k):
            hits[rank] *= _DECAY
        self._visible[key] = self._visible.get(key, 0.0) * _DECAY + 1.0
        if token in row.tokens:
            hits[row.tokens.index(token)] += 1.0
        self._rates.pop(key, None)

    def _estimate(self, row: NeighbourRow, key: int) -> list[float]:
        hits = self._hits.get(key, [0.0] * self.k)
        weight = _PRIOR + self._visible.get(key, 0.0)
        first = FIRST[row.order - 1][row.sure]
        rates = [(_PRIOR * first + hits[0]) / weight]
        for rank in range(1, self.k):
            prior = (1.0 - first) * OTHERS[min(rank, len(OTHERS)) - 1]
            rates.append((_PRIOR * prior + hits[rank]) / weight)
        return _non_increasing(rates)


def _non_increasing(values: Sequence[float]) -> list[float]:
    """Return the nearest values that never grow: runs that do share their mean."""
    runs: list[tuple[float, int]] = []
    for value in values:
        total, size = value, 1
        while runs and runs[-1][0] * size < total * runs[-1][1]:
            before = runs.pop()
            total, size = total + before[0], size + before[1]
        runs.append((total, size))
    return [total / size for total, size in runs for _ in range(size)]


def _row_kind(row: NeighbourRow, level: int) -> int:
    """Return the number of the counts that a row at a depth belongs to."""
    return (row.order * (SUREST + 1) + row.sure) * 2 + (level > 0)
