"""Attention kernels against plain matrix products."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

import ragspec.verification.kernels as kernels

HEADS, WIDTH, LOCAL = 4, 8, 8
RULES = {
    "sliding": masking_utils.sliding_window_causal_mask_function(LOCAL),
    "chunked": masking_utils.chunked_causal_mask_function(LOCAL, torch.zeros(3, dtype=torch.int64)),
}


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


def products(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, form: kernels.AttentionForm
) -> Any:
    out, weight = kernels.explicit(query, key, value, form)
    return kernels.with_sinks(out, weight, form.sinks).to(query.dtype)


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
    sinks = torch.linspace(-1, 2, HEADS).double() if extra in ("sinks", "both") else None
    inputs = query, key, value, kernels.AttentionForm(mask, causal, 0.4, 0.0, softcap, sinks)
    expected = products(*inputs)
    monkeypatch.setattr(kernels, "SCORES", 1)
    torch.testing.assert_close(products(*inputs), expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("starts", [[0, 0], [11, 11], [4, 17]])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, HEADS).double()])
def test_the_kernel_with_weights_gives_what_products_do(
    sinks: torch.Tensor | None, groups: int, rule: str, starts: list[int]
) -> None:
    n = 21
    mask = mask_of(rule, starts, n)
    query, key, value = draw(2, groups, n, mask.shape[3])
    form = kernels.AttentionForm(mask, scaling=0.4, sinks=sinks)
    expected = products(query, key, value, form)
    result = kernels.by_weights(query, key, value, form)
    torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)
    if sinks is None:
        result = kernels.attend(query, key, value, form)
        torch.testing.assert_close(result, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, HEADS).double()])
def test_the_kernel_is_as_exact_as_products(dtype: torch.dtype, sinks: torch.Tensor | None) -> None:
    mask = mask_of("sliding", [600], 40)
    query, key, value = draw(1, 2, 40, 640)
    exact = products(query, key, value, kernels.AttentionForm(mask, sinks=sinks))
    q, k, v = (part.to(dtype) for part in (query, key, value))
    form = kernels.AttentionForm(mask.to(dtype), sinks=sinks)
    whole, result = products(q, k, v, form), kernels.by_weights(q, k, v, form)
    assert result.dtype is dtype
    errors = [float((each.double() - exact).abs().mean()) for each in (result, whole)]
    assert errors[0] < 1.5 * errors[1]


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_triangle_ends_at_the_last_query_and_key(groups: int, dtype: torch.dtype) -> None:
    """CUDA's kernels take the causal flag; other devices get the mask."""
    query, key, value = (part.to(dtype) for part in draw(2, groups, 6, 15))
    mask = torch.full((6, 15), float("-inf"), dtype=dtype).triu(10)[None, None]
    expected = products(query, key, value, kernels.AttentionForm(mask, scaling=0.3))
    close = 1e-12 if dtype is torch.float64 else 0.03
    torch.testing.assert_close(kernels.behind(query, key, value, 0.3), expected, atol=close, rtol=0)


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
            products(query, key, value, kernels.AttentionForm(causal=True, softcap=softcap))
        sizes.append(largest.bytes)
    assert sizes[0] <= 8 * 16 * HEADS * (start + n) < 8 * n * (start + n) <= sizes[1]
