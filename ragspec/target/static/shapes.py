"""The shapes that steps are made for: few, so that each is captured once and used often."""

from __future__ import annotations

QUERIES = (1, 4, 8, 16, 32, 64)  # of each row, the root included
MOST_QUERIES = QUERIES[-1]
LEAST_SLOTS = 128


def queries_of(count: int) -> int:
    """Return the queries of the least step that holds `count`."""
    return next(size for size in QUERIES if size >= count)


def rows_of(count: int, most: int) -> int:
    """Return the rows of the least step that holds `count`, at most those of the buffers."""
    return min(1 << (count - 1).bit_length(), most)


def slots_of(count: int, most: int) -> int:
    """Return the slots of the least step that holds `count`, at most those of the buffers.

    Steps of a quarter of a power of two: at most a fourth is read in vain.
    """
    if count <= LEAST_SLOTS:
        return min(LEAST_SLOTS, most)
    quarter = 1 << max((count - 1).bit_length() - 3, 0)
    return min(-(-count // quarter) * quarter, most)
