"""Masks of chains, block by block: nothing that is seen is left out, and little memory is taken."""

from __future__ import annotations

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

import ragspec.target.chain_mask as chain_mask
from ragspec.target.chain_mask import Block, ChainMask

LOCAL = 8
RULES = {
    "full": (causal_mask_function, None),
    "sliding": (sliding_window_causal_mask_function(LOCAL), LOCAL),
    "chunked": (chunked_causal_mask_function(LOCAL, torch.zeros(3, dtype=torch.int64)), LOCAL),
}


def make(rule: str, starts: list[int], n: int, rows: int = 0) -> ChainMask:
    function, local = RULES[rule]
    shape = rows or len(starts), n, max(starts) + n
    return ChainMask(function, torch.tensor(starts), shape, local, torch.float64)


def by_hand(rule: str, starts: list[int], n: int) -> torch.Tensor:
    """Return what each query sees: bool [R, n, S]."""
    seen = torch.zeros(len(starts), n, max(starts) + n, dtype=torch.bool)
    for row, start in enumerate(starts):
        for i in range(n):
            at = start + i
            first = {"full": 0, "sliding": max(0, at - LOCAL + 1), "chunked": at // LOCAL * LOCAL}
            seen[row, i, first[rule] : at + 1] = True
    return seen


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("starts", [[0], [7], [13], [3, 12, 0]])
@pytest.mark.parametrize("n", [1, 8, 9, 27])
@pytest.mark.parametrize("size", [4, 8, 64])
def test_blocks_see_what_was_made_by_hand(rule: str, starts: list[int], n: int, size: int) -> None:
    mask, seen = make(rule, starts, n), by_hand(rule, starts, n)
    found = torch.zeros_like(seen)
    blocks = list(mask.blocks(size))
    assert [place for b in blocks for place in range(b.start, b.end)] == list(range(n))
    for given in blocks:
        block, part = mask.of(given)
        assert block.end - block.start <= size
        assert (min(starts) + block.start) % size == 0 or block.start == 0
        queries, slots = block.end - block.start, block.last - block.first
        if part is None:
            allowed = torch.ones(queries, slots).tril(slots - queries).bool()
        else:
            assert torch.isneginf(part[part != 0]).all()
            allowed = part[:, 0] == 0
        found[:, block.start : block.end, block.first : block.last] = allowed
    assert torch.equal(found, seen)
    assert torch.equal(mask.spelled_out()[:, 0] == 0, seen)


def test_a_block_of_a_window_is_no_wider_than_both() -> None:
    widths = [block.last - block.first for block in make("sliding", [100], 64).blocks(16)]
    assert max(widths) == LOCAL - 1 + 16


def test_equal_blocks_share_one_mask_and_causal_ones_need_none() -> None:
    mask = make("sliding", [0], 80)
    parts = [mask.of(block)[1] for block in mask.blocks(4)]
    assert parts[0] is parts[1] is None
    assert len({id(part) for part in parts[3:]}) == 1
    assert [mask.of(block)[1] for block in mask.blocks(4)][5] is parts[5]
    chunked = make("chunked", [24], 80)
    assert all(chunked.of(block)[1] is None for block in chunked.blocks(4))


@pytest.mark.parametrize("most", [0, 1 << 20])
def test_no_more_masks_are_kept_than_fit(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_mask, "KEPT_BYTES", most)
    mask = make("sliding", [0, 5], 64)
    blocks = list(mask.blocks(16))
    first, again = ([mask.of(block)[1] for block in blocks] for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert one is not None and other is not None
        assert (one is other) is (most > 0)
        assert torch.equal(one, other)


def test_to_other_code_it_is_a_plain_mask() -> None:
    mask = make("sliding", [5], 12, rows=2)
    whole = mask.spelled_out()
    assert type(whole) is torch.Tensor and mask.shape == whole.shape == (2, 1, 12, 17)
    assert mask.dtype == whole.dtype and mask.device == whole.device
    for found, expected in (
        (mask[:, :, :, :9], whole[:, :, :, :9]),
        (mask + 1.0, whole + 1.0),
        (mask.view(-1), whole.view(-1)),
        (torch.cat([mask, mask]), torch.cat([whole, whole])),
        (mask.to(torch.float32), whole.to(torch.float32)),
        (mask == 0, whole == 0),
    ):
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    assert mask.to("cpu") is mask


def test_a_copy_to_another_device_stays_small() -> None:
    moved = make("sliding", [5], 12).to("meta")
    assert isinstance(moved, ChainMask)
    assert moved.device.type == "meta" and moved.starts.device.type == "meta"
    assert list(moved.blocks(4)) == list(make("sliding", [5], 12).blocks(4))
    assert list(moved.blocks(64)) == [Block(0, 12, 0, 17)]
