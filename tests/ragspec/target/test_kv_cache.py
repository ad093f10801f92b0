"""The slot cache against a plain list of tokens per row, and against computing everything anew."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.target.causal import CausalTarget
from ragspec.target.kv_cache import SlotCache
from ragspec.trees.draft_tree import DraftTree
from tests.support.architectures import VOCAB, build

HEADS, WIDTH, LAYERS = 2, 3, 2


def states(marks: list[list[int]]) -> torch.Tensor:
    """Return states [B, heads, n, width] that carry the given marks."""
    return torch.tensor(marks, dtype=torch.float64)[:, None, :, None].repeat(1, HEADS, 1, WIDTH)


def write(cache: SlotCache, marks: list[list[int]]) -> None:
    for layer in range(LAYERS):
        keys, values = cache.update(states(marks) + layer, -states(marks) - layer, layer)
        assert (
            keys.shape == values.shape == (len(marks), HEADS, cache.book.extent + len(marks[0]), 3)
        )
    cache.advance(len(marks[0]))


def held(cache: SlotCache, row: int) -> list[int]:
    """Return the marks of a row's committed slots, after checking that all layers agree."""
    length = cache.book.lengths[row % len(cache.book.lengths)]
    found = cache.layers[0].keys[row, 0, :length, 0]
    for i, layer in enumerate(cache.layers):
        assert (layer.keys[row, :, :length] == (found + i)[None, :, None]).all()
        assert (layer.values[row, :, :length] == -(found + i)[None, :, None]).all()
    marks: list[int] = found.long().tolist()
    return marks


@given(st.data())
@settings(max_examples=60)
def test_a_cache_holds_what_lists_hold(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 3))
    cache = SlotCache(rows, capacity=4)
    truth: list[list[int]] = [[] for _ in range(rows)]
    mark = 0
    for _ in range(data.draw(st.integers(1, 6))):
        fresh: list[list[int]] = [[] for _ in truth]
        for _ in range(data.draw(st.integers(1, 2))):  # one or two forwards before a commit
            n = data.draw(st.integers(1, 5))
            block = [[mark := mark + 1 for _ in range(n)] for _ in truth]
            write(cache, block)
            fresh = [old + new for old, new in zip(fresh, block, strict=True)]
        indices = st.lists(st.integers(0, len(fresh[0]) - 1), unique=True)
        kept = [sorted(data.draw(indices)) for _ in truth]
        cache.commit(kept)
        truth = [t + [f[i] for i in k] for t, f, k in zip(truth, fresh, kept, strict=True)]
        if data.draw(st.booleans()):
            order = data.draw(st.lists(st.integers(0, len(truth) - 1), min_size=1, max_size=3))
            cache.select(order)
            truth = [list(truth[i]) for i in order]
        if data.draw(st.booleans()):
            row, length = data.draw(st.integers(0, len(truth) - 1)), data.draw(st.integers(0, 6))
            cache.truncate(row, length)
            truth[row] = truth[row][:length]
        assert [held(cache, row) for row in range(len(truth))] == truth
        assert cache.book.pending == 0


@given(st.data())
@settings(max_examples=40)
def test_copies_of_a_sequence_are_kept_alike(data: st.DataObject) -> None:
    """A cache of B sequences with C copies does what C caches of B sequences do."""
    rows, copies = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 3))
    joint = SlotCache(rows, 4, copies)
    alone = [SlotCache(rows, 4) for _ in range(copies)]
    mark = 0
    for _ in range(data.draw(st.integers(1, 5))):
        n = data.draw(st.integers(1, 4))
        blocks = [[[mark := mark + 1 for _ in range(n)] for _ in range(rows)] for _ in alone]
        whole = states([row for block in blocks for row in block])
        for layer in range(LAYERS):
            joint.update(whole + layer, -whole - layer, layer)
        joint.advance(n)
        for cache, block in zip(alone, blocks, strict=True):
            write(cache, block)
        indices = st.lists(st.integers(0, n - 1), unique=True)
        kept = [sorted(data.draw(indices)) for _ in range(rows)]
        order = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=3))
        for cache in (joint, *alone):
            cache.commit(kept)
            cache.select(order)
        rows = len(order)
        assert all(cache.book.lengths == joint.book.lengths for cache in alone)
        for copy, cache in enumerate(alone):
            for row in range(rows):
                assert held(joint, copy * rows + row) == held(cache, row)


def test_nothing_is_moved_where_the_first_slots_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlotCache(1, 8)
    write(cache, [[1, 2, 3, 4]])
    monkeypatch.setattr(cache, "_move", lambda *a: pytest.fail("copied slots that were in place"))
    cache.commit([[0, 1, 2]])
    assert held(cache, 0) == [1, 2, 3]


def test_buffers_grow_by_doubling_and_are_views_otherwise() -> None:
    cache = SlotCache(1, 4)
    write(cache, [[1, 2, 3]])
    cache.commit([[0, 1, 2]])
    before = cache.layers[0].keys.data_ptr()
    keys, _ = cache.update(states([[4]]), -states([[4]]), 0)
    assert keys.data_ptr() == before, "a step copied the cache"
    cache.update(states([[5]]), -states([[5]]), 1)
    cache.advance(1)
    cache.commit([[0]])
    write(cache, [[5, 6]])
    assert cache.layers[0].keys.shape[2] == 8
    cache.commit([[0, 1]])
    assert held(cache, 0) == [1, 2, 3, 4, 5, 6]


def test_sizes_for_the_mask_count_speculative_slots() -> None:
    cache = SlotCache(2, 8)
    write(cache, [[1, 2, 3], [1, 2, 3]])
    cache.commit([[0, 1, 2], [0]])
    assert cache.get_seq_length() == 3
    write(cache, [[7, 8], [7, 8]])
    assert cache.get_mask_sizes(4, 0) == (9, 0)
    assert cache.get_max_length() == -1


@given(st.data())
@settings(max_examples=15)
def test_keeping_slots_equals_recomputing_them(data: st.DataObject) -> None:
    """What a model keeps of drafts is, to rounding, what it computes for the same text at once."""
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    text = torch.randint(VOCAB - 1, (8,), generator=random).tolist()
    target = CausalTarget(build(data.draw(st.sampled_from(["llama", "gemma3_text"]))))
    with target.open(1, 16) as kept, target.open(1, 64) as anew:
        pending = text
        for _ in range(3):
            n = data.draw(st.integers(1, 5))
            parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
            tokens = torch.randperm(VOCAB - 1, generator=random)[:n].tolist()
            kept.verify([pending], [DraftTree.build(tokens, parents, "test")])
            node = data.draw(st.integers(-1, n - 1))
            path: list[int] = []
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            kept.commit([path])
            text = [*text, *(tokens[i] for i in path)]
            pending = torch.randint(VOCAB - 1, (1,), generator=random).tolist()
            text = [*text, *pending]
        anew.verify([text[:-1]], [DraftTree.empty()])
        for layer, other in zip(kept.cache.layers, anew.cache.layers, strict=True):
            n = kept.cache.book.lengths[0]
            assert n == len(text) - 1
            assert torch.allclose(layer.keys[:, :, :n], other.keys[:, :, :n], atol=1e-10)
            assert torch.allclose(layer.values[:, :, :n], other.values[:, :, :n], atol=1e-10)
