"""The caches of sequences against lists of tokens."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.verification.batch import Batch, TreeView
from ragspec.verification.model_cache import ModelCache
from ragspec.verification.sequence_cache import SequenceCache

HEADS, WIDTH, LAYERS = 2, 3, 2


def states(marks: list[int], copies: int = 1) -> torch.Tensor:
    """Return states [C, heads, n, width] that carry the given marks, those of copies apart."""
    rows = torch.tensor(marks, dtype=torch.float64) + 0.5 * torch.arange(copies)[:, None]
    return rows[:, None, :, None].repeat(1, HEADS, 1, WIDTH)


def of(rows: list[SequenceCache], counts: list[int]) -> Batch:
    """Return a batch of so many tokens of each sequence."""
    places = [row.length + torch.arange(n)[None] for row, n in zip(rows, counts, strict=True)]
    views = [TreeView(row.length, at, at, None) for row, at in zip(rows, places, strict=True)]
    return Batch(rows, views)


def write(rows: list[SequenceCache], marks: list[list[int]]) -> None:
    """Write marks of several sequences in one packed forward."""
    batch, copies = of(rows, [len(each) for each in marks]), rows[0].copies
    packed = torch.cat([states(each, copies) for each in marks], 2)
    for layer in range(LAYERS):
        keys, values = batch.update(packed + layer, -packed - layer, layer)
        parts = batch.parts(keys) if len(rows) > 1 else [(keys, values)]
        for row, each, (seen, _) in zip(rows, marks, parts, strict=True):
            assert seen.shape == (copies, HEADS, row.extent + len(each), WIDTH)
            assert torch.equal(seen[:, :, row.extent :], states(each, copies) + layer)
            if row.length:
                assert torch.equal(seen[:, :, : row.length], row.layers(row.length)[layer][0])
    batch.advance()


def held(cache: SequenceCache) -> list[int]:
    """Return the marks of the committed slots, after checking that layers and copies agree."""
    layers = cache.layers(cache.length)
    marks: list[int] = layers[0][0][0, 0, :, 0].long().tolist() if layers else []
    for layer, (keys, values) in layers.items():
        assert torch.equal(keys, states(marks, cache.copies) + layer)
        assert torch.equal(values, -keys)
    return marks


@given(st.data())
@settings(max_examples=60)
def test_caches_hold_what_lists_hold(data: st.DataObject) -> None:
    count, copies = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
    caches = [SequenceCache(data.draw(st.integers(0, 9)), copies) for _ in range(count)]
    truth: list[list[int]] = [[] for _ in range(count)]
    mark = 0
    for _ in range(data.draw(st.integers(1, 5))):
        line = data.draw(st.lists(st.integers(0, count - 1), unique=True, min_size=1))
        fresh: dict[int, list[int]] = {row: [] for row in line}
        for _ in range(data.draw(st.integers(1, 2))):
            blocks = []
            for row in line:
                n = data.draw(st.integers(1, 5))
                blocks.append(list(range(mark, mark + n)))
                fresh[row] += blocks[-1]
                mark += n
            write([caches[row] for row in line], blocks)
        for row in line:
            slots = sorted(data.draw(st.sets(st.integers(0, len(fresh[row]) - 1))))
            caches[row].commit(slots)
            truth[row] = truth[row] + [fresh[row][slot] for slot in slots]
        row = data.draw(st.sampled_from(line))
        length = data.draw(st.integers(0, len(truth[row])))
        if data.draw(st.booleans()):
            caches.append(caches[row].prefix(length, data.draw(st.integers(0, 4))))
            truth.append(truth[row][:length])
            count += 1
        elif data.draw(st.booleans()):
            caches[row].truncate(length)
            truth[row] = truth[row][:length]
        if data.draw(st.booleans()):
            caches[row].compact()
        assert [held(cache) for cache in caches] == truth
        assert all(cache.pending == 0 for cache in caches)


def test_buffers_grow_by_an_eighth_and_are_views_otherwise() -> None:
    cache = SequenceCache(64)
    write([cache], [list(range(60))])
    cache.commit(range(60))
    before = cache.layers(1)[0][0].data_ptr()
    for mark in range(60, 64):
        write([cache], [[mark]])
        cache.commit([0])
    assert cache.layers(1)[0][0].data_ptr() == before, "a step copied the cache"
    write([cache], [[64, 65]])
    assert cache.buffers.capacity == 66 + 66 // 8
    cache.commit([0, 1])
    assert held(cache) == list(range(66))
    cache.compact()
    assert cache.buffers.capacity == 66 + 66 // 8
    large = cache.prefix(66, 400)
    large.compact()
    assert large.buffers.capacity == 66 and held(large) == list(range(66))


def test_sizes_for_the_mask_count_speculative_slots() -> None:
    cache = SequenceCache(8)
    write([cache], [[1, 2, 3]])
    cache.commit([0, 2])
    write([cache], [[7, 8]])
    sizes = ModelCache(of([cache], [4]))
    assert sizes.get_seq_length() == 4
    assert sizes.get_mask_sizes(4, 0) == (8, 0)
