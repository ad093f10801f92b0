"""The numerics of a cost grid: in which order to time it, how to fill, smooth and read it.

A grid has a line for each context length and a column for each number of rows in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
MAX_ROWS = 65  # 64 draft nodes and the root

Floats = NDArray[np.float64]


def measuring_order(rows: tuple[int, ...], lengths: tuple[int, ...]) -> list[tuple[int, int]]:
    """Return (length, rows) by importance, each once.

    Three sizes at the middle length, then how the other lengths compare, then the rest: a slow
    model, of which only a part can be timed, still gets a curve of about the right shape.
    """
    middle = lengths[len(lengths) // 2]
    others = [length for length in reversed(lengths) if length != middle]
    half = rows[len(rows) // 2]
    order = [(middle, n) for n in (rows[0], rows[-1], half)]
    order += [(length, n) for n in (rows[0], half) for length in others]
    sizes = [*rows[::2], *rows]
    order += [(length, n) for length in (middle, *others) for n in sizes]
    return list(dict.fromkeys(order))


def agree(samples: list[float]) -> bool:
    """Tell whether two samples or more already agree within 3 %."""
    return len(samples) >= 2 and max(samples) <= 1.03 * min(samples)


def filled(
    known: dict[tuple[int, int], float],
    rows: Sequence[int],
    lengths: Sequence[int],
    best: int,
) -> Floats:
    """Return the whole grid from the points that were measured, `best` the fullest length."""
    table = np.empty((len(lengths), len(rows)))
    at_best = [n for n in rows if (n, best) in known]
    shape = np.interp(rows, at_best, [known[n, best] for n in at_best])
    for i, length in enumerate(lengths):
        here = [n for n in rows if (n, length) in known]
        ratios = [known[n, length] / float(shape[list(rows).index(n)]) for n in here]
        table[i] = shape * (np.interp(rows, here, ratios) if here else 1.0)
    return table


def isotonic(values: Floats) -> list[float]:
    """Return the nearest non-decreasing sequence (pool adjacent violators): unbiased by noise."""
    pools: list[tuple[float, int]] = []
    for value in values.tolist():
        mean, count = float(value), 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean = (mean * count + before * size) / (count + size)
            count += size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


def spread(rows: Sequence[int], seconds: Floats) -> Floats:
    """Return the seconds at 1, 2, ... MAX_ROWS rows."""
    return np.array([at(rows, seconds.tolist(), n) for n in range(1, MAX_ROWS + 1)])


def at(rows: Sequence[int], seconds: Sequence[float], n: int) -> float:
    """Interpolate at n rows; beyond the last row goes on with the slope of the upper half."""
    last = len(rows) - 1
    if n <= rows[last]:
        return float(np.interp(n, rows, seconds))
    half = last // 2
    if last == 0:
        return float(seconds[0])
    slope = (seconds[last] - seconds[half]) / (rows[last] - rows[half])
    return float(seconds[last] + slope * (n - rows[last]))
