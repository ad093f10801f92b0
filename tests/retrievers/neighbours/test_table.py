from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.neighbours.table import NOTHING, SUREST, NeighbourRow, NeighbourTable, Place

VOCAB, K = 6, 3
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(st.tuples(tokens, st.permutations(range(VOCAB))), min_size=1, max_size=30)


def place(*tokens: int) -> Place:
    a, b, c = ([NOTHING] * 3 + list(tokens))[-3:]
    return a, b, c


def naive(text: list[tuple[int, list[int]]], ending: list[int], orders: int) -> list[int] | None:
    """What was best after the last place that ends like `ending`, the longest ending first."""
    whole = [t for t, _ in text]
    for order in range(min(orders, len(ending)), 0, -1):
        for end in range(len(whole), order - 1, -1):
            if whole[end - order : end] == ending[-order:]:
                return list(text[end - 1][1][:K])
    return None


@given(texts, st.lists(tokens, min_size=1, max_size=3), st.integers(1, 3))
def test_the_longest_known_key_is_detected(
    text: list[tuple[int, list[int]]], ending: list[int], orders: int
) -> None:
    table = NeighbourTable(K, orders=orders)
    table.learn_text([t for t, _ in text], [best[:K] for _, best in text])
    result = table.find(place(*ending))
    assert (None if result is None else list(result.tokens)) == naive(text, ending, orders)


def test_a_row_is_surer_the_oftener_its_best_token_is_confirmed() -> None:
    table = NeighbourTable(K)
    assert table.find(place(1, 2)) is None
    for times in range(7):
        table.learn(place(1, 2), [4, times % VOCAB, 5])
        one, two = table.find(place(2)), table.find(place(1, 2))
        assert one is not None
        assert two is not None
        assert (one.order, two.order) == (1, 2)
        assert one.sure == two.sure == min(times, SUREST)
    table.learn(place(1, 2), [3, 4, 5])
    assert table.find(place(1, 2)) == NeighbourRow([3, 4, 5], 2, 0)
    assert table.find(place(2)) == NeighbourRow([3, 4, 5], 1, 0)


def test_rows_are_dropped_oldest_first() -> None:
    table = NeighbourTable(1, orders=1, most=2)
    for token, best in ((1, 3), (2, 4), (1, 5), (3, 0)):
        table.learn(place(token), [best])
    assert len(table) == 2
    known = [table.find(place(token)) for token in (1, 2, 3)]
    assert [row and row.tokens for row in known] == [[5], None, [0]]


@pytest.mark.parametrize("sizes", [{"k": 0}, {"orders": 0}, {"orders": 4}, {"most": 0}])
def test_sizes_are_checked(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected"):
        NeighbourTable(**sizes)
