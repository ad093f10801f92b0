"""Attention by parts and blocks is that over whole masks, and repeats nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.masking_utils import causal_mask_function

import ragspec.target.kernels as kernels
from ragspec.target.chain_mask import ChainMask
from ragspec.target.kernels import behind, explicit, in_blocks
from tests.ragspec.target.test_chain_mask import RULES, make

HEADS, WIDTH = 4, 8


def draw(rows: int, groups: int, n: int, slots: int, seed: int = 0) -> list[torch.Tensor]:
    """Return query, key and value; keys are a view of a longer buffer, as a cache's are."""
    random = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, n, HEADS, WIDTH, generator=random, dtype=torch.float64)
    shape = rows, groups, slots + 5, WIDTH
    keys = torch.randn(2, *shape, generator=random, dtype=torch.float64)[..., :slots, :]
    return [query.transpose(1, 2), keys[0], keys[1]]


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how many bytes the largest storage has that is made inside the block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple) else (made,):
            if type(each) is torch.Tensor:
                self.bytes = max(self.bytes, each.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("starts", [[0], [11], [4, 17]])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("way", ["plain", "softcap", "sinks", "both", "no kernel", "width"])
def test_blocks_give_what_a_whole_mask_does(
    way: str, groups: int, rule: str, starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 8)
    if way == "no kernel":
        monkeypatch.setattr(kernels, "_KERNEL", "_no_such_kernel")
    n, rows = 21, 2
    mask = make(rule, starts, n, rows)
    query, key, value = draw(rows, groups, n, mask.shape[3])
    value = value[..., :6] if way == "width" else value
    softcap = 1.5 if way in ("softcap", "both") else None
    sinks = torch.linspace(-1, 2, HEADS, dtype=torch.float64) if way in ("sinks", "both") else None
    found = in_blocks(query, key, value, mask, 0.4, softcap, sinks)
    whole = mask.spelled_out()
    expected = explicit(query, key, value, whole, False, 0.4, softcap, sinks)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=0)
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_are_rounded_as_near_as_one(dtype: torch.dtype, sinks: bool) -> None:
    mask = make("sliding", [600], 40)
    query, key, value = draw(1, 2, 40, 640)
    sink = torch.linspace(-1, 2, HEADS, dtype=torch.float64) if sinks else None
    exact = explicit(query, key, value, mask.spelled_out(), False, None, None, sink)
    q, k, v = (part.to(dtype) for part in (query, key, value))
    small = ChainMask(mask.rule, mask.starts, (1, 40, 640), mask.local, dtype)
    whole = explicit(q, k, v, small.spelled_out(), False, None, None, sink)
    found = in_blocks(q, k, v, small, None, None, sink)
    assert found.dtype is dtype
    errors = [float((each.double() - exact).abs().mean()) for each in (found, whole)]
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


@pytest.mark.parametrize("way", ["window", "window, sinks", "full, softcap", "full, widths"])
def test_neither_masks_nor_keys_nor_weights_of_all_queries_are_made(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "BLOCK", 32)
    monkeypatch.setattr(kernels, "SCORES", 1 << 15)
    n, start = 512, 512
    query, key, value = draw(1, 1, n, start + n)
    value = value[..., :4] if way == "full, widths" else value
    mask = make("sliding" if way.startswith("window") else "full", [start], n)
    sinks = torch.zeros(HEADS, dtype=torch.float64) if way == "window, sinks" else None
    softcap = 1.5 if way == "full, softcap" else None
    with Largest() as largest:
        in_blocks(query, key, value, mask, None, softcap, sinks)
    assert 0 < largest.bytes <= 8 * max(n * HEADS * WIDTH, 2 * kernels.SCORES)
    assert 8 * max(n * HEADS * WIDTH, 2 * kernels.SCORES) <= 8 * n * (start + n) / 4
    with Largest() as largest:
        explicit(query, key, value, mask.spelled_out(), False, None, softcap, sinks)
    assert largest.bytes >= 8 * n * (start + n), "the comparison can fail"


def test_full_attention_of_ragged_chains_is_causal_row_by_row() -> None:
    starts, n = [2, 9], 5
    query, key, value = draw(2, 2, n, 14)
    mask = ChainMask(causal_mask_function, torch.tensor(starts), (2, n, 14), None, torch.float64)
    found = in_blocks(query, key, value, mask, None)
    for row, start in enumerate(starts):
        one, own, other = (part[row : row + 1] for part in (query, key, value))
        alone = explicit(
            one, own[:, :, : start + n], other[:, :, : start + n], None, True, None, None, None
        )
        torch.testing.assert_close(found[row : row + 1], alone, atol=1e-12, rtol=0)
