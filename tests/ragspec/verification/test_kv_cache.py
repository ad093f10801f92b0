"""The slot cache against a plain list of tokens per row, and against computing everything anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import ragspec.verification.kernels as kernels
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.causal import CausalTarget
from ragspec.verification.kernels import attend, behind, explicit, masked
from ragspec.verification.kv_cache import SlotCache
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


def held(cache: SlotCache, row: int, copy: int = 0) -> list[int]:
    """Return the marks of a sequence's committed slots, after checking that all layers agree."""
    length, book = cache.length(row), cache.book
    place = copy * book.rows + cache.row_order.index(row)
    result = cache.layers[0].keys[place, 0, :length, 0]
    for i, layer in enumerate(cache.layers):
        assert (layer.keys[place, :, :length] == (result + i)[None, :, None]).all()
        assert (layer.values[place, :, :length] == -(result + i)[None, :, None]).all()
    marks: list[int] = result.long().tolist()
    return marks


class Pair:
    """A cache, and the lists that it has to agree with: by copy and sequence, all drawn."""

    def __init__(self, data: st.DataObject) -> None:
        self.data = data
        self.rows, self.copies = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 2))
        self.cache = SlotCache(self.rows, 4, self.copies)
        self.truth: list[list[list[int]]] = [[[] for _ in range(self.rows)] for _ in self.of_copy]
        self.mark, self.row = 0, st.integers(0, self.rows - 1)

    @property
    def of_copy(self) -> range:
        return range(self.copies)

    def block(self, rows: int, n: int) -> list[list[list[int]]]:
        """Write n new marks to every row in line; return them."""
        start, self.mark = self.mark, self.mark + self.copies * rows * n
        result = torch.arange(start, self.mark).reshape(self.copies, rows, n)
        write(self.cache, result.flatten(0, 1).tolist())
        marks: list[list[list[int]]] = result.tolist()
        return marks

    def commit(self) -> None:
        """Run a forward or two over some rows and keep some of what they wrote."""
        draw = self.data.draw
        line = draw(st.lists(self.row, unique=True, min_size=1))
        line = self.cache.select_rows(line)
        blocks = [
            self.block(len(line), draw(st.integers(1, 5))) for _ in range(draw(st.integers(1, 2)))
        ]
        n = sum(len(block[0][0]) for block in blocks)
        selected = [sorted(draw(st.lists(st.integers(0, n - 1), unique=True))) for _ in line]
        self.cache.commit(selected)
        for copy in self.of_copy:
            for place, (row, slots) in enumerate(zip(line, selected, strict=True)):
                fresh = [mark for block in blocks for mark in block[copy][place]]
                self.truth[copy][row] = self.truth[copy][row] + [fresh[slot] for slot in slots]

    def copy(self) -> None:
        """Let one row hold the beginning of another, or of itself."""
        source, target = self.data.draw(self.row), self.data.draw(self.row)
        length = self.data.draw(st.integers(0, len(self.truth[0][source])))
        self.cache.copy(source, target, length)
        for texts in self.truth:
            texts[target] = texts[source][:length]

    def truncate(self) -> None:
        """Forget the end of one row in line."""
        row, length = self.data.draw(st.sampled_from(self.cache.line)), self.data.draw(self.row)
        self.cache.truncate(self.cache.line.index(row), length)
        for texts in self.truth:
            texts[row] = texts[row][:length]

    def drop(self) -> None:
        """Give up the memory of some rows, which are then taken again."""
        dropped = self.data.draw(st.lists(self.row, unique=True))
        self.cache.drop(dropped)
        for layer in self.cache.layers:
            assert len(layer.keys) == (self.rows - len(dropped)) * self.copies, "memory is free"
        for row in dropped:
            self.cache.copy(row, row, 0)
            for texts in self.truth:
                texts[row] = []


@given(st.data())
@settings(max_examples=60)
def test_a_cache_holds_what_lists_hold(data: st.DataObject) -> None:
    pair = Pair(data)
    for _ in range(data.draw(st.integers(1, 5))):
        pair.commit()
        for change in (pair.copy, pair.truncate, pair.drop):
            if data.draw(st.booleans()):
                change()
        rows = range(pair.rows)
        results = [[held(pair.cache, row, copy) for row in rows] for copy in pair.of_copy]
        assert results == pair.truth
        assert pair.cache.book.pending == 0 and sorted(pair.cache.row_order) == list(rows)


def test_rows_that_lie_side_by_side_are_not_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SlotCache(4, 8)
    write(cache, [[mark] for mark in range(1, 5)])
    cache.commit([[0]] * 4)
    monkeypatch.setattr(cache, "_swap", lambda *a: pytest.fail("moved rows that lay in line"))
    for rows in ([1, 2], [3], [0, 1, 2], [2, 3]):
        assert cache.select_rows(rows) == sorted(rows)
        before = cache.layers[0].keys.data_ptr()
        keys, _ = cache.update(states([[9]] * len(rows)), states([[9]] * len(rows)), 0)
        step = cache.layers[0].keys[0].numel() * cache.layers[0].keys.element_size()
        assert keys.data_ptr() == before + min(rows) * step, "a step copied the cache"
    monkeypatch.undo()
    cache.select_rows([0, 1, 2, 3])
    moved: list[tuple[int, int]] = []
    monkeypatch.setattr(cache, "_swap", lambda *places: moved.append(places))
    cache.select_rows([0, 2, 3])
    assert len(moved) == 1, "the row of one that has left is filled by one other"


def test_nothing_is_moved_where_the_first_slots_are_preserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
    with target.open(1, 16) as selected, target.open(1, 64) as again:
        pending = text
        for _ in range(3):
            n = data.draw(st.integers(1, 5))
            parents = [data.draw(st.integers(-1, i - 1)) for i in range(n)]
            tokens = torch.randperm(VOCAB - 1, generator=random)[:n].tolist()
            selected.verify([pending], [DraftTree.build(tokens, parents, "test")])
            node = data.draw(st.integers(-1, n - 1))
            path: list[int] = []
            while node >= 0:
                path.insert(0, node)
                node = parents[node]
            selected.commit([path])
            text = [*text, *(tokens[i] for i in path)]
            pending = torch.randint(VOCAB - 1, (1,), generator=random).tolist()
            text = [*text, *pending]
        again.verify([text[:-1]], [DraftTree.empty()])
        for layer, other in zip(selected.cache.layers, again.cache.layers, strict=True):
            n = selected.cache.book.lengths[0]
            assert n == len(text) - 1
            assert torch.allclose(layer.keys[:, :, :n], other.keys[:, :, :n], atol=1e-10)
            assert torch.allclose(layer.values[:, :, :n], other.values[:, :, :n], atol=1e-10)


KERNELS_HEADS, KERNELS_WIDTH, LOCAL = 4, 8, 8
RULES = {
    "sliding": sliding_window_causal_mask_function(LOCAL),
    "chunked": chunked_causal_mask_function(LOCAL, torch.zeros(3, dtype=torch.int64)),
}


def draw(rows: int, groups: int, n: int, slots: int, seed: int = 0) -> list[torch.Tensor]:
    """Return query, key and value; keys are a view of a longer buffer, as a cache's are."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(
        rows, n, KERNELS_HEADS, KERNELS_WIDTH, generator=random, dtype=torch.float64
    )
    shape = rows, groups, slots + 5, KERNELS_WIDTH
    keys = torch.randn(2, *shape, generator=random, dtype=torch.float64)[..., :slots, :]
    return [query.transpose(1, 2), keys[0], keys[1]]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many bytes the largest storage has that is made inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        instance = func(*args, **(kwargs or {}))
        for each in instance if isinstance(instance, tuple) else (instance,):
            if type(each) is torch.Tensor:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return instance


def mask_of(rule: str, starts: list[int], n: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return the additive mask [B, 1, n, S] of chains that begin at these slots."""
    batch = torch.arange(len(starts))[:, None, None, None]
    queries = (torch.tensor(starts)[:, None] + torch.arange(n))[:, None, :, None]
    slots = torch.arange(max(starts) + n)[None, None, None]
    allowed = RULES[rule](batch, batch[:1] * 0, queries, slots)
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, float("-inf"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("extra", ["plain", "softcap", "sinks", "both"])
def test_blocks_of_queries_give_what_one_product_does(
    extra: str, groups: int, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, rows = 50, 2
    mask = None if causal else mask_of("sliding", [11, 4], n)
    query, key, value = draw(rows, groups, n, 11 + n)
    softcap = 1.5 if extra in ("softcap", "both") else None
    sinks = torch.linspace(-1, 2, KERNELS_HEADS).double() if extra in ("sinks", "both") else None
    inputs = query, key, value, mask, causal, 0.4, softcap, sinks
    expected = explicit(*inputs)
    monkeypatch.setattr(kernels, "SCORES", 1)
    torch.testing.assert_close(explicit(*inputs), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("starts", [[0, 0], [11, 11], [4, 17]])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, KERNELS_HEADS).double()])
def test_the_kernel_with_weights_gives_what_products_do(
    sinks: torch.Tensor | None, groups: int, rule: str, starts: list[int]
) -> None:
    n = 21
    mask = mask_of(rule, starts, n)
    query, key, value = draw(2, groups, n, mask.shape[3])
    expected = explicit(query, key, value, mask, False, 0.4, None, sinks)
    result = masked(query, key, value, mask, 0.4, sinks)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    if sinks is None:
        result = attend(query, key, value, mask, False, 0.4)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, KERNELS_HEADS).double()])
def test_the_kernel_rounds_as_near_as_products(
    dtype: torch.dtype, sinks: torch.Tensor | None
) -> None:
    mask = mask_of("sliding", [600], 40)
    query, key, value = draw(1, 2, 40, 640)
    exact = explicit(query, key, value, mask, False, None, None, sinks)
    q, k, v = (part.to(dtype) for part in (query, key, value))
    whole = explicit(q, k, v, mask.to(dtype), False, None, None, sinks)
    result = masked(q, k, v, mask.to(dtype), None, sinks)
    assert result.dtype is dtype
    errors = [float((each.double() - exact).abs().mean()) for each in (result, whole)]
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_triangle_ends_at_the_last_query_and_key(groups: int, dtype: torch.dtype) -> None:
    """What CUDA's kernels are asked for; other devices spell the triangle out."""
    query, key, value = (part.to(dtype) for part in draw(2, groups, 6, 15))
    mask = torch.full((6, 15), float("-inf"), dtype=dtype).triu(10)[None, None]
    expected = explicit(query, key, value, mask, False, 0.3, None, None)
    close = 1e-12 if dtype is torch.float64 else 0.03
    torch.testing.assert_close(behind(query, key, value, 0.3), expected, atol=close, rtol=0)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_weights_of_all_queries_are_not_held_at_once(
    softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, start = 512, 512
    query, key, value = draw(1, 1, n, start + n)
    sizes = []
    for scores in (1 << 15, 1 << 25):
        monkeypatch.setattr(kernels, "SCORES", scores)
        with Largest() as largest:
            explicit(query, key, value, None, True, None, softcap, None)
        sizes.append(largest.bytes)
    assert sizes[0] <= 8 * 16 * KERNELS_HEADS * (start + n) < 8 * n * (start + n) <= sizes[1]
