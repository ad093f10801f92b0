"""Few shapes: each holds what is asked, none is much larger."""

from __future__ import annotations

import pytest

from ragspec.target.static.shapes import (
    LEAST_SLOTS,
    MOST_QUERIES,
    QUERIES,
    queries_of,
    rows_of,
    slots_of,
)

MOST = 1 << 20


def test_queries_are_the_least_of_six_sizes() -> None:
    assert [queries_of(n) for n in (1, 2, 4, 5, 8, 9, 16, 17, 33, 64)] == [
        *(1, 4, 4, 8, 8, 16, 16, 32, 64, 64)
    ]
    assert QUERIES[0] == 1 and MOST_QUERIES == 64
    with pytest.raises(StopIteration):
        queries_of(MOST_QUERIES + 1)


def test_rows_are_powers_of_two_within_the_buffers() -> None:
    assert [rows_of(n, 16) for n in (1, 2, 3, 4, 5, 8, 9, 16)] == [1, 2, 4, 4, 8, 8, 16, 16]
    assert rows_of(5, 6) == 6


def test_slots_are_at_most_a_fourth_too_many() -> None:
    for count in [*range(1, 3000), 32_768, 32_769, 100_001]:
        slots = slots_of(count, MOST)
        assert slots >= count
        assert slots == LEAST_SLOTS or slots * 4 <= count * 5
    assert [slots_of(n, MOST) for n in (1, 128, 129, 160, 161, 257)] == [
        128,
        128,
        160,
        160,
        192,
        320,
    ]


def test_shapes_of_all_lengths_are_few() -> None:
    assert len({slots_of(count, MOST) for count in range(1, 32_769)}) == 1 + 8 * 4


def test_slots_end_with_the_buffers() -> None:
    assert slots_of(100, 64) == 64
    assert slots_of(1000, 1008) == 1008
