from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.retrievers.neighbours.table import SUREST, NeighbourRow, RankRates


def test_rates_go_from_what_is_assumed_to_what_was_visible() -> None:
    rates, row = RankRates(3), NeighbourRow([4, 5, 6], 1, 0)
    assumed = rates.of(row, 0)
    assert assumed[0] > assumed[1] > assumed[2] > 0
    for _ in range(300):
        rates.learn(row, 0, 5)
    known = rates.of(row, 0)
    # A later rank is never claimed above an earlier one: they share what both of them had.
    assert known[0] == known[1] == pytest.approx(0.46, abs=0.03)
    assert known[2] < 0.1
    assert rates.of(row, 1) == assumed  # other depths have their own
    for _ in range(600):
        rates.learn(row, 0, 4)
    assert rates.of(row, 0)[0] > 0.85


@given(st.lists(st.integers(0, 9), max_size=60), st.integers(1, 8))
def test_rates_are_probabilities_that_never_grow(truth: list[int], k: int) -> None:
    rates, row = RankRates(k), NeighbourRow(list(range(k)), 2, 1)
    for token in truth:
        rates.learn(row, 1, token)
    result = rates.of(row, 1)
    assert len(result) == k
    assert all(a >= b > 0 for a, b in pairwise(result))
    assert sum(result) <= 1.0 + 1e-9


@pytest.mark.parametrize("order", [1, 2, 3])
def test_surer_and_longer_rows_are_believed_more(order: int) -> None:
    rates = RankRates(8)
    firsts = [
        rates.of(NeighbourRow(list(range(8)), order, sure), 0)[0] for sure in range(SUREST + 1)
    ]
    assert firsts == sorted(firsts)
    if order > 1:
        assert firsts[0] > rates.of(NeighbourRow(list(range(8)), order - 1, 0), 0)[0]
