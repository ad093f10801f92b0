from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.neighbours.table import (
    NOTHING,
    SUREST,
    NeighbourLayer,
    NeighbourRow,
    NeighbourTable,
    Place,
)
from tests.retrievers.corpus.test_catalogue import TIMES
from tests.support.damage import DAMAGES

VOCAB, K = 6, 3
tokens = st.integers(0, VOCAB - 1)
texts = st.lists(st.tuples(tokens, st.permutations(range(VOCAB))), min_size=1, max_size=30)


def place(*tokens: int) -> Place:
    a, b, c = ([NOTHING] * 3 + list(tokens))[-3:]
    return a, b, c


def taught(text: list[tuple[int, list[int]]], table: NeighbourTable | NeighbourLayer) -> None:
    table.learn_text([t for t, _ in text], [best[:K] for _, best in text])


def naive(text: list[tuple[int, list[int]]], ending: list[int], orders: int) -> list[int] | None:
    """What was best after the last place that ends like `ending`, the longest ending first."""
    whole = [t for t, _ in text]
    for order in range(min(orders, len(ending)), 0, -1):
        for end in range(len(whole), order - 1, -1):
            if whole[end - order : end] == ending[-order:]:
                return list(text[end - 1][1][:K])
    return None


@given(texts, st.lists(tokens, min_size=1, max_size=3), st.integers(1, 3), st.booleans())
def test_the_longest_known_key_is_detected(
    text: list[tuple[int, list[int]]], ending: list[int], orders: int, layered: bool
) -> None:
    table = NeighbourTable(VOCAB, K, orders=orders)
    over = NeighbourLayer(table) if layered else table
    taught(text, over)
    result = over.find(place(*ending))
    assert (None if result is None else list(result.tokens)) == naive(text, ending, orders)
    assert layered == (len(table) == 0)


def test_nothing_is_known_at_first() -> None:
    table = NeighbourTable(VOCAB, K)
    assert len(table) == 0
    assert all(table.find(place(token)) is None for token in range(VOCAB))
    assert table.rows.dtype == np.int32
    assert table.rows.shape == (VOCAB, K)


def test_a_row_is_surer_the_oftener_its_best_token_is_confirmed() -> None:
    table = NeighbourTable(VOCAB, K)
    for times in range(7):
        table.learn(place(1, 2), [4, times % VOCAB, 5])
        one, two = table.row(2), table.find(place(1, 2))
        assert one is not None
        assert two is not None
        assert (one.order, two.order) == (1, 2)
        assert one.sure == two.sure == min(times, SUREST)
    table.learn(place(1, 2), [3, 4, 5])
    assert table.find(place(1, 2)) == NeighbourRow([3, 4, 5], 2, 0)
    assert table.row(2) == NeighbourRow([3, 4, 5], 1, 0)


def test_rows_of_longer_keys_are_dropped_oldest_first() -> None:
    table = NeighbourTable(VOCAB, 1, orders=2, contexts=2)
    for before, best in ((1, 3), (2, 4), (1, 5), (3, 0)):
        table.learn(place(before, 0), [best])
    assert len(table.longer) == 2
    known = [table.find(place(before, 0)) for before in (1, 2, 3)]
    assert [(row.order, row.tokens) for row in known if row] == [(2, [5]), (1, [0]), (2, [0])]


def test_a_layer_never_changes_what_it_lies_over() -> None:
    table = NeighbourTable(VOCAB, K)
    table.learn(place(1, 2), [0, 1, 2])
    layer, other = NeighbourLayer(table), NeighbourLayer(table)
    layer.learn(place(1, 2), [5, 4, 3])
    layer.learn(place(3), [5, 4, 3])
    assert layer.find(place(1, 2)) == NeighbourRow([5, 4, 3], 2, 0)
    for untouched in (table, other):
        assert untouched.find(place(1, 2)) == NeighbourRow([0, 1, 2], 2, 0)
        assert untouched.find(place(3)) is None


@pytest.mark.parametrize("sizes", [{"k": 0}, {"orders": 0}, {"orders": 4}, {"contexts": 0}])
def test_sizes_are_checked(sizes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="expected"):
        NeighbourTable(VOCAB, **sizes)


def test_a_vocabulary_smaller_than_k_is_held() -> None:
    table = NeighbourTable(2, 8)
    table.learn(place(1), [1, 0])
    assert table.row(1) == NeighbourRow([1, 0], 1, 0)


# --- on disk ------------------------------------------------------------------------------------


def full(orders: int = 3) -> NeighbourTable:
    table = NeighbourTable(VOCAB, K, orders=orders)
    generator = np.random.default_rng(0)
    text = generator.integers(VOCAB, size=60).tolist()
    table.learn_text(text, [generator.permutation(VOCAB)[:K].tolist() for _ in text])
    return table


@pytest.mark.parametrize("orders", [1, 2, 3])
def test_a_table_comes_back_as_it_was(tmp_path: Path, orders: int) -> None:
    table = full(orders)
    table.save(tmp_path / "n.store", model="m1")
    again = NeighbourTable.open(tmp_path / "n.store", model="m1")
    spots = [place(a, b, c) for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)]
    assert [again.find(spot) for spot in spots] == [table.find(spot) for spot in spots]
    for each in (again, table):  # the order of forgetting comes back as well
        each.longer.most = len(each.longer)
        each.learn(place(5, 5, 5), [0, 1, 2])
    assert [again.find(spot) for spot in spots] == [table.find(spot) for spot in spots]


def test_an_empty_table_comes_back(tmp_path: Path) -> None:
    NeighbourTable(VOCAB, K).save(tmp_path / "n.store")
    assert len(NeighbourTable.open(tmp_path / "n.store")) == 0


def test_a_table_of_another_model_is_refused(tmp_path: Path) -> None:
    full().save(tmp_path / "n.store", model="m1")
    with pytest.raises(StoreError, match="another model"):
        NeighbourTable.open(tmp_path / "n.store", model="m2")


def damages(whole: bytes, seed: str) -> Iterator[bytes]:
    """Yield the bytes of a file, damaged in many ways."""
    draw = random.Random(seed)
    for _ in range(TIMES):
        damaged = draw.choice(DAMAGES)(whole, draw)
        if damaged != whole:
            yield damaged


ARRAYS = ("rows", "sure", "keys", "key_rows", "key_orders", "key_sure")


@pytest.mark.parametrize("file", ["CURRENT", "manifest.json", *(f"{a}.npy" for a in ARRAYS)])
def test_damage_is_noticed(tmp_path: Path, file: str) -> None:
    full().save(tmp_path / "n.store")
    (path,) = tmp_path.rglob(file)
    for damaged in damages(path.read_bytes(), file):
        path.write_bytes(damaged)
        with pytest.raises(StoreError):
            NeighbourTable.open(tmp_path / "n.store")


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("rows", np.full((VOCAB, K), VOCAB, dtype=np.int32)),
        ("rows", np.zeros((VOCAB, K + 1), dtype=np.int32)),
        ("key_orders", np.full(3, 7, dtype=np.int32)),
        ("keys", np.zeros((2, 3), dtype=np.int64)),
    ],
)
def test_arrays_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, array: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = np.save

    def forged(path: Path, value: np.ndarray, **options: bool) -> None:
        saved(path, array if path.stem == name else value, **options)

    monkeypatch.setattr(np, "save", forged)
    full().save(tmp_path / "n.store")
    with pytest.raises(StoreError, match="damaged"):
        NeighbourTable.open(tmp_path / "n.store")
