"""Attention over keys and values: fused where a kernel serves, committed slots apart if long.

Shapes throughout: query [B, heads, n, width], key and value [B, groups, S, width], the result
[B, heads, n, width]. Queries that share a key head read it where it lies: keys, values and masks
are not repeated for them.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

_HALVES = (torch.bfloat16, torch.float16)
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"  # what sdpa calls, with its second result
SCORES = 1 << 25  # weights of queries that are held at once where no kernel is fused


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend by torch's own choice of kernels; mask [B, 1 or heads, n, S], additive."""
    heads, groups = query.shape[1], key.shape[1]
    if heads == groups and _is_slow(query):
        twice = query.expand(-1, -1, 2, -1)
        return functional.scaled_dot_product_attention(
            twice, key, value, mask, dropout, scale=scaling
        )[:, :, :1]
    if heads == groups:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=causal, scale=scaling
        )
    if causal:
        return functional.scaled_dot_product_attention(
            query, key, value, None, dropout, is_causal=True, scale=scaling, enable_gqa=True
        )
    if query.device.type == "cpu" and query.shape[2] > 2 * query.shape[3]:
        # A mask of many queries costs more to repeat than keys and values do.
        if mask is not None and mask.shape[1] == 1 and joins(query, value):
            return masked(query, key, value, mask, scaling)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scaling, enable_gqa=True
        )
    return _folded(query, key, value, mask, scaling)


def _is_slow(query: Tensor) -> bool:
    """Tell whether two equal queries are faster than one: the CPU's kernel in half precision.

    Measured in bfloat16 over 800 keys: 0.10 ms for two, 0.37 ms for one; over 8,000 2.8 and 6.4.
    """
    return query.shape[2] == 1 and query.device.type == "cpu" and query.dtype in _HALVES


def _folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend with the query heads of a group laid along the query axis."""
    batch, heads, n, width = query.shape
    groups = key.shape[1]
    folded = query.reshape(batch, groups, heads // groups * n, width)
    if mask is not None and mask.shape[1] == heads:
        mask = mask.reshape(mask.shape[0], groups, heads // groups * n, -1)
    elif mask is not None:
        mask = mask.expand(batch, 1, n, -1).repeat(1, 1, heads // groups, 1)
    out = functional.scaled_dot_product_attention(folded, key, value, mask, scale=scaling)
    return out.reshape(batch, heads, n, -1)


def joins(query: Tensor, value: Tensor) -> bool:
    """Tell whether the kernel that says how much weight it gave serves these tensors."""
    alike = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    return alike and hasattr(torch.ops.aten, _KERNEL)


def in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    current: Tensor | None,
    scaling: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to the committed slots, which need no mask, and to the new ones; join the two.

    current: additive mask [B, 1, n, m] of the last m slots; None where these are the queries' own
    and causal. sinks [heads]: see `with_sinks`.

    The kernel returns the logarithm of the sum of weights of each query, by which parts add up.
    """
    batch, heads, n, width = query.shape
    kernel, groups = getattr(torch.ops.aten, _KERNEL), key.shape[1]
    before = key.shape[2] - (n if current is None else current.shape[3])
    result, weight = _kernel(
        query, key[:, :, before:], value[:, :, before:], current, current is None, scaling
    )
    if before:
        folded = query.reshape(batch, groups, heads // groups * n, width)
        old, old_weight = kernel(folded, key[:, :, :before], value[:, :, :before], scale=scaling)
        old, old_weight = old.reshape(batch, heads, n, width), old_weight.reshape(batch, heads, n)
        share = torch.sigmoid(weight - old_weight)[..., None]
        result = torch.lerp(old.to(share.dtype), result.to(share.dtype), share)
        weight = weight if sinks is None else torch.logaddexp(weight, old_weight)
    return with_sinks(result, weight, sinks).to(query.dtype)


def with_sinks(result: Tensor, weight: Tensor, sinks: Tensor | None) -> Tensor:
    """Return what is left of an attention [B, heads, n, width] beside each head's sink, if any.

    weight [B, heads, n]: logarithm of the sum of weights without it.
    """
    if sinks is None:
        return result
    share = torch.sigmoid(weight - sinks.reshape(1, -1, 1).to(weight.dtype))[..., None]
    return result.to(share.dtype) * share


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend by the kernel that gives weights, see `in_parts`; weights are [B, heads, n]."""
    batch, heads, n, _ = query.shape
    kernel = getattr(torch.ops.aten, _KERNEL)
    query, key, value = _grouped(query, key, value)
    mask = _for_groups(mask, batch, key.shape[0] // batch)
    result, weight = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return result.reshape(batch, heads, n, -1), weight.reshape(batch, heads, n)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B * groups, share, n, width], and views of their keys and values alike."""
    share = query.shape[1] // key.shape[1]
    folded = query.reshape(-1, share, *query.shape[2:])
    known = [part.flatten(0, 1)[:, None].expand(-1, share, -1, -1) for part in (key, value)]
    return folded, known[0], known[1]


def _for_groups(mask: Tensor | None, batch: int, groups: int) -> Tensor | None:
    """Return a mask [B or 1, 1, n, S] as one of `_grouped` queries: a view for one row or group."""
    if mask is None or mask.shape[0] == 1 or groups == 1:
        return mask
    return mask.expand(batch, groups, -1, -1).reshape(batch * groups, 1, *mask.shape[2:])


def behind(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend causally where the queries' own slots are the last ones, by CUDA's kernels.

    Both align the triangle to the last query and last key, so that they need no mask.
    """
    n, slots, shape = query.shape[2], key.shape[2], query.shape
    shared = query.shape[1] != key.shape[1]
    if shared and query.dtype not in _HALVES:  # the kernel for wider numbers knows no groups
        query, key, value = _grouped(query, key, value)
        shared = False
    out = functional.scaled_dot_product_attention(
        query, key, value, causal_lower_right(n, slots), scale=scaling, enable_gqa=shared
    )
    return out.reshape(*shape[:3], -1)


def masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend by the kernel that gives weights; mask [B or 1, 1, n, S]. It repeats no keys."""
    out, weight = _kernel(query, key, value, mask, False, scaling)
    return with_sinks(out, weight, sinks).to(query.dtype)


def explicit(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend by plain matrix products, for what the fused kernels lack.

    causal: the last query sees all slots, each one before it one less. Long prompts go by blocks
    of queries, so that at most `SCORES` weights are held at once.
    """
    batch, heads, n, width = query.shape
    groups, slots = key.shape[1], key.shape[2]
    size = max(16, SCORES // (batch * heads * slots))
    if n > size:
        parts = []
        for start in range(0, n, size):
            end = min(n, start + size)
            known = slots - n + end if causal else slots
            rows = None if mask is None else mask[:, :, start:end]
            block = query[:, :, start:end], key[:, :, :known], value[:, :, :known]
            parts.append(explicit(*block, rows, causal, scaling, softcap, sinks))
        return torch.cat(parts, dim=2)
    scale = width**-0.5 if scaling is None else scaling
    folded = query.reshape(batch, groups, heads // groups * n, width)
    scores = (folded @ key.transpose(2, 3)).reshape(batch, heads, n, slots) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        visible = torch.ones(n, slots, dtype=torch.bool, device=query.device).tril(slots - n)
        scores = scores.masked_fill(~visible, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(batch, -1, n, 1).to(scores.dtype)
        scores = torch.cat([scores, column], dim=-1)
    work = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=work)[..., :slots].to(value.dtype)
    out = weights.reshape(batch, groups, -1, slots) @ value
    return out.reshape(batch, heads, n, -1)
