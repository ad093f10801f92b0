"""Stacks that stay where they are, their cache, and what a step reads and writes of them."""

from __future__ import annotations

import pytest
import torch

from ragspec.verification.static.buffers import (
    LayerShape,
    StackedCache,
    Stacks,
    StepLayer,
    compact,
    step_cache,
)

CPU = torch.device("cpu")
WIDE = LayerShape(2, 8, torch.float64, CPU)
NARROW = LayerShape(1, 4, torch.float32, CPU)
LAYERS = [(WIDE, WIDE), (NARROW, WIDE), (WIDE, NARROW)]
ROWS, SLOTS = 4, 10


def filled() -> Stacks:
    stacks = Stacks(LAYERS, ROWS, SLOTS)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for buffer in stacks.buffers:
            buffer.normal_()
    return stacks


def addresses(stacks: Stacks) -> list[int]:
    return [buffer.data_ptr() for buffer in stacks.buffers]


def test_one_buffer_holds_all_keys_and_values_of_a_shape() -> None:
    stacks = filled()
    assert [tuple(buffer.shape) for buffer in stacks.buffers] == [
        (4, ROWS, 2, SLOTS, 8),
        (2, ROWS, 1, SLOTS, 4),
    ]
    assert stacks.device == CPU
    pairs = stacks.pairs()
    for pair, shapes in zip(pairs, LAYERS, strict=True):
        for view, shape in zip(pair, shapes, strict=True):
            assert view.shape == (ROWS, shape.heads, SLOTS, shape.width)
            assert view.dtype == shape.dtype
    places = {view.data_ptr() for pair in pairs for view in pair}
    assert len(places) == 6, "no two share a place"


def test_a_cache_writes_and_reads_the_stacks_themselves() -> None:
    stacks = filled()
    cache = StackedCache(stacks, 2)
    for layer, (keys, _) in zip(cache.layers, stacks.pairs(), strict=True):
        layer.keys[1, :, 3] = 7.0
        assert bool((keys[1, :, 3] == 7.0).all())
        assert layer.keys.shape[0] == 2
    assert cache.book.capacity == SLOTS


def test_buffers_move_only_where_they_have_to_and_keep_what_they_hold() -> None:
    stacks = filled()
    cache = StackedCache(stacks, 3)
    before, held = addresses(stacks), [buffer.clone() for buffer in stacks.buffers]
    assert not cache.reserve(SLOTS)
    assert addresses(stacks) == before
    assert cache.reserve(SLOTS + 1)
    assert stacks.slots == cache.book.capacity == 2 * SLOTS
    for buffer, old in zip(stacks.buffers, held, strict=True):
        assert torch.equal(buffer[:, :, :, :SLOTS], old)
        assert not buffer[:, :, :, SLOTS:].any()
    assert cache.layers[0].keys.data_ptr() == stacks.pairs()[0][0].data_ptr()
    assert cache.reserve(100) and stacks.slots == 100


def test_a_change_that_fails_changes_nothing() -> None:
    stacks = filled()
    before = list(stacks.buffers)

    def fails_at_last(buffer: torch.Tensor) -> torch.Tensor:
        if buffer.dtype == torch.float32:
            raise MemoryError
        return buffer[:, :2].clone()

    with pytest.raises(MemoryError):
        stacks.change(fails_at_last)
    assert all(now is old for now, old in zip(stacks.buffers, before, strict=True))
    assert (stacks.rows, stacks.slots) == (ROWS, SLOTS)


def test_a_row_that_is_dropped_is_empty_and_no_memory_moves() -> None:
    stacks = filled()
    cache = StackedCache(stacks, 3)
    cache.book.lengths = [4, 5, 6]
    before, held = addresses(stacks), [buffer.clone() for buffer in stacks.buffers]
    cache.drop([1])
    assert [cache.length(row) for row in range(3)] == [4, 0, 6]
    assert cache.row_order == [0, 1, 2] and cache.book.rows == 3
    assert addresses(stacks) == before
    assert all(torch.equal(a, b) for a, b in zip(stacks.buffers, held, strict=True))


def test_those_in_line_begin_at_the_first_place() -> None:
    cache = StackedCache(filled(), 4)
    cache.book.lengths = [1, 2, 3, 4]
    assert sorted(cache.line_up([2, 3])) == [2, 3]
    assert cache.book.first == 0
    assert {cache.length(row) for row in (2, 3)} == {3, 4}


@pytest.mark.parametrize("rows", [1, 3])
def test_a_step_writes_its_slots_in_place_and_sees_all(rows: int) -> None:
    stacks = filled()
    held = [buffer.clone() for buffer in stacks.buffers]
    columns = torch.tensor([[2, 3], [0, 1], [6, 7]])[:rows]
    cache = step_cache(stacks, rows, 8, columns)
    layer = cache.layers[0]
    assert isinstance(layer, StepLayer)
    keys, values = torch.ones(rows, 2, 2, 8).double(), 2 * torch.ones(rows, 2, 2, 8).double()
    known_keys, known_values = layer.update(keys, values)
    assert known_keys.shape == known_values.shape == (rows, 2, 8, 8)
    assert layer.get_mask_sizes(2) == (8, 0) and layer.get_max_length() == 8
    assert layer.get_seq_length() == 0
    for row in range(rows):
        assert bool((known_keys[row, :, columns[row]] == 1).all())
        assert bool((known_values[row, :, columns[row]] == 2).all())
    changed = [int((now != old).sum()) for now, old in zip(stacks.buffers, held, strict=True)]
    assert changed == [rows * 2 * 2 * 8 * 2, 0], "nothing else is written"
    assert known_keys.data_ptr() == stacks.pairs()[0][0].data_ptr()


def test_slots_move_in_all_layers_of_the_first_rows() -> None:
    stacks = filled()
    held = [buffer.clone() for buffer in stacks.buffers]
    source = torch.tensor([[3, 5, 7], [2, 2, 4]])
    target = torch.tensor([[3, 4, 5], [1, 2, 3]])
    compact(stacks, source, target)
    for now, old in zip(stacks.buffers, held, strict=True):
        expected = old.clone()
        for row in range(2):  # reads before it writes: 5 is moved and overwritten
            expected[:, row, :, target[row]] = old[:, row, :, source[row]]
        assert torch.equal(now, expected)
