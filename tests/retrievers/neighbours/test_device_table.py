"""The neighbour table on a device: it tells what the host's tells, and waits once for a draft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.methods.cascade import Cascade
from ragspec.retrievers.methods.token_recycling import NeighbourDrafter
from ragspec.retrievers.neighbours import device_table as neighbours_device
from ragspec.retrievers.neighbours.device_table import DeviceNeighbourTable
from ragspec.retrievers.neighbours.rows import NOTHING, HostRows, Place, Shape
from ragspec.retrievers.neighbours.table import NeighbourTable
from tests.support.codes import broken

VOCAB, K = 12, 3
CPU = torch.device("cpu")
BESTS = [[1, 2, 3], [1, 5, 2], [4, 1, 0], [9, 8, 7]]
# Few tokens and few rows, so that equal tokens meet in a batch and rows are confirmed.
batches = st.lists(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(BESTS)), max_size=9), max_size=5
)
Lesson = list[tuple[int, list[int]]]


def place(token: int) -> Place:
    return NOTHING, NOTHING, token


def teach(host: HostRows, there: Any, lesson: Lesson) -> None:
    for token, best in lesson:
        host.learn(place(token), best)
    tokens = torch.tensor([token for token, _ in lesson], dtype=torch.int64)
    there.learn(tokens, torch.tensor([best for _, best in lesson]).reshape(-1, K))


def assert_same(host: HostRows, there: Any) -> None:
    assert [there.row(t) for t in range(VOCAB)] == [host.find(place(t)) for t in range(VOCAB)]


class AnyOrder(TorchFunctionMode):
    """Writes in the reverse order, as a device may: of equal places the first is written last."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__setitem__" and isinstance(args[1], torch.Tensor):
            value = args[2].flip(0) if isinstance(args[2], torch.Tensor) else args[2]
            args = (args[0], args[1].flip(0), value)
        return func(*args, **(kwargs or {}))


class Crossings(TorchFunctionMode):
    """Counts what is asked for on the host, each of which waits for a device."""

    WAIT = ("cpu", "numpy", "tolist", "item", "__int__", "__index__", "__bool__", "__float__")
    SIZED = ("nonzero", "unique", "masked_select", "argwhere", "equal", "bincount")

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        self.calls += 1
        self.waits += name in self.WAIT
        assert name not in self.SIZED, f"{name} has to wait for its size"
        return func(*args, **(kwargs or {}))


# --- the table ----------------------------------------------------------------------------------


@given(batches, st.sampled_from(["table", "layer"]), st.booleans())
def test_it_learns_what_the_host_learns(lessons: list[Lesson], form: str, backwards: bool) -> None:
    check_learning(DeviceNeighbourTable, lessons, form, backwards)


def check_learning(kind: Any, lessons: list[Lesson], form: str, backwards: bool) -> None:
    host, there = NeighbourTable(VOCAB, K, orders=1), kind(VOCAB, K, device=CPU)
    with AnyOrder() if backwards else Crossings():
        if form == "layer" and lessons:
            teach(host, there, lessons[0])
        over: tuple[HostRows, Any] = (
            (host, there) if form == "table" else (host.layer(), there.layer())
        )
        for lesson in lessons:
            teach(*over, lesson)
            assert_same(*over)
    assert len(there) == len(host)
    if form == "layer":
        alone = NeighbourTable(VOCAB, K, orders=1), kind(VOCAB, K, device=CPU)
        teach(*alone, lessons[0] if lessons else [])
        assert_same(alone[0], there)


LONG: list[Lesson] = [
    [(1, BESTS[0]), (2, BESTS[3]), (1, BESTS[1]), (1, BESTS[2]), (2, BESTS[3]), (1, BESTS[2])],
    [(1, BESTS[2])] * 6 + [(2, BESTS[3]), (3, BESTS[0])],
    [(2, BESTS[3]), (3, BESTS[3]), (3, BESTS[0]), (1, BESTS[3]), (1, BESTS[2])],
]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("cells[tokens] = new[last]", "cells[tokens] = new"),
        ("sort(stable=True)", "sort(stable=True, descending=True)"),
        ("new[last]", "new[first]"),
        ("torch.where(opens, held, best.roll(1))", "held"),
        ("torch.maximum(refuted, first - 1)", "refuted"),
        ("torch.where(refuted < first, before[:, -1], 0)", "before[:, -1]"),
        ("torch.where(refuted < first, before[:, -1], 0)", "0"),
        (".clamp(max=SUREST)", ""),
        ("            self._local[tokens] = True", "            pass"),
        ("held = torch.where(self._local[tokens], held, NOTHING)", "pass"),
        ("instance._cells = self._cells.clone()", "pass"),
    ],
)
def test_the_check_of_learning_can_fail(old: str, new: str) -> None:
    kind = broken(neighbours_device, old, new).DeviceNeighbourTable
    for form in ("table", "layer"):
        check_learning(DeviceNeighbourTable, LONG, form, True)
    with pytest.raises((AssertionError, RuntimeError)):
        for form in ("table", "layer"):
            check_learning(kind, LONG, form, True)


def test_what_is_outside_the_vocabulary_teaches_nothing() -> None:
    there = DeviceNeighbourTable(VOCAB, K, device=CPU)
    there.learn(torch.tensor([1, VOCAB, -1, 99, 2]), torch.tensor([BESTS[0]] * 4 + [[1, VOCAB, 2]]))
    assert [there.row(t) is not None for t in range(VOCAB)] == [t == 1 for t in range(VOCAB)]
    shape = Shape(((-1, 0),), leaves=True)
    for outside in (VOCAB, VOCAB + 1, -1):
        assert there.around(outside, shape)(place(outside)) is None


@given(st.lists(st.tuples(st.integers(0, 11), st.permutations(range(12))), max_size=40), st.data())
def test_a_draft_finds_the_rows_of_its_shape(lesson: Lesson, data: st.DataObject) -> None:
    host, there = NeighbourTable(VOCAB, K, orders=1), DeviceNeighbourTable(VOCAB, K, device=CPU)
    teach(host, there, [(token, best[:K]) for token, best in lesson])
    nodes: list[tuple[int, int]] = []
    for _ in range(data.draw(st.integers(0, 12))):
        free = st.tuples(st.integers(-1, len(nodes) - 1), st.integers(0, K))
        nodes.append(data.draw(free.filter(lambda node: node not in nodes)))
    shape, root = Shape(tuple(nodes), data.draw(st.booleans())), data.draw(st.integers(0, 11))
    parents = {parent for parent, _ in nodes}
    reached, expected = {-1: root}, {root}
    for node, (parent, rank) in enumerate(nodes):
        row = host.find(place(reached[parent])) if parent in reached else None
        if row is not None and rank < K:  # ranks that the table does not have lead nowhere
            reached[node] = row.tokens[rank]
            if shape.leaves or node in parents:
                expected.add(row.tokens[rank])
    find = there.around(root, shape)
    for token in range(VOCAB):
        assert find(place(token)) == (host.find(place(token)) if token in expected else None)


def test_rows_are_reported_as_they_were_in_the_order_of_the_steps() -> None:
    there, shape = DeviceNeighbourTable(VOCAB, K, device=CPU), Shape((), leaves=True)
    heard: list[tuple[list[int], int, int]] = []

    def notify(row: Any, level: int, token: int) -> None:
        heard.append((row.tokens, level, token))

    teach(NeighbourTable(VOCAB, K), there, [(1, BESTS[0])])
    assert there.around(1, shape)(place(1)) is not None
    there.count([place(1), place(5), place(1)], (7, 8), notify)
    teach(NeighbourTable(VOCAB, K), there, [(1, BESTS[1]), (5, BESTS[2])])
    there.count([place(99), place(5)], (3, 4), notify)
    assert heard == []
    row = there.around(1, shape)(place(1))
    assert row is not None and row.tokens == BESTS[1]
    assert heard == [(BESTS[0], 0, 7), (BESTS[2], 1, 4)]
    there.around(1, shape)
    assert len(heard) == 2
    for _ in range(40):  # plain decoding looks nothing up: what waits must not pile up
        there.count([place(1)], (1,), notify)
    assert len(heard) > 20


# --- on disk ------------------------------------------------------------------------------------


def test_stores_are_those_of_the_host(tmp_path: Path) -> None:
    host, there = NeighbourTable(VOCAB, K, orders=1), DeviceNeighbourTable(VOCAB, K, device=CPU)
    for lesson in LONG:
        teach(host, there, lesson)
    host.save(tmp_path / "host", model="m1")
    there.save(tmp_path / "there", model="m1")
    for name in ("rows", "sure", "keys"):
        (one,), (other,) = (list((tmp_path / n).rglob(f"{name}.npy")) for n in ("host", "there"))
        assert one.read_bytes() == other.read_bytes()
    for folder in (tmp_path / "host", tmp_path / "there"):
        assert_same(host, DeviceNeighbourTable.open(folder, device=CPU, model="m1"))
        assert_same(NeighbourTable.open(folder, model="m1"), there)
        with pytest.raises(StoreError, match="another model"):
            DeviceNeighbourTable.open(folder, device=CPU, model="m2")
    opened = DeviceNeighbourTable.open(tmp_path / "there", device=CPU)
    opened.learn(torch.tensor([1]), torch.tensor([BESTS[3]]))
    opened.save(tmp_path / "there")  # still of the model that it was learned from
    with pytest.raises(StoreError, match="another model"):
        NeighbourDrafter(tmp_path / "there").fits("m2")
    with pytest.raises(StoreError, match="another model"):
        Cascade([NeighbourDrafter(opened)]).fits("m2")
    NeighbourTable(VOCAB, K).save(tmp_path / "longer")
    with pytest.raises(InputError, match="orders=1"):
        DeviceNeighbourTable.open(tmp_path / "longer", device=CPU)


# --- on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["table", "layer"])
def test_a_gpu_learns_what_the_host_learns_and_never_waits(form: str) -> None:
    host = NeighbourTable(VOCAB, K, orders=1)
    there = DeviceNeighbourTable(VOCAB, K, device=torch.device("cuda"))
    over: tuple[HostRows, Any] = (host, there) if form == "table" else (host.layer(), there.layer())
    generator = np.random.default_rng(0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for size in (0, 1, 5, 40, 400):
            picked = zip(
                generator.integers(0, 4, size), generator.integers(0, 4, size), strict=True
            )
            teach(*over, [(int(token), BESTS[best]) for token, best in picked])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_same(*over)
