"""Attention kernels: fused where possible, with separate attention to committed slots if long.

Shapes throughout: query [B, heads, n, width], key and value [B, groups, S, width], output
[B, heads, n, width]. Keys, values and masks are not repeated for query heads that share a key head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

_HALVES = (torch.bfloat16, torch.float16)
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"  # called by sdpa; returns weights as well
SCORES = 1 << 25  # attention weights that `explicit` holds at once


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
    dropout: float = 0.0,
) -> Tensor:
    """Attend by sdpa, which chooses the kernel; mask [B, 1 or heads, n, S], additive."""
    shared = query.shape[1] != key.shape[1]
    if not shared and _is_slow(query):
        twice = query.expand(-1, -1, 2, -1)
        return functional.scaled_dot_product_attention(
            twice, key, value, mask, dropout, scale=scaling
        )[:, :, :1]
    if causal or not shared:
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, is_causal=causal, scale=scaling, enable_gqa=shared
        )
    if query.device.type == "cpu" and query.shape[2] > 2 * query.shape[3]:
        # Repeating the mask of many queries costs more than repeating keys and values.
        if mask is not None and mask.shape[1] == 1 and joins(query, value):
            return masked(query, key, value, mask, scaling)
        return functional.scaled_dot_product_attention(
            query, key, value, mask, dropout, scale=scaling, enable_gqa=True
        )
    return _folded(query, key, value, mask, scaling)


def _is_slow(query: Tensor) -> bool:
    """Return whether two equal queries are faster than one: on a CPU in half precision.

    Measured in bfloat16: over 800 keys 0.10 ms for two and 0.37 ms for one, over 8,000 keys 2.8 and
    6.4 ms.
    """
    return query.shape[2] == 1 and query.device.type == "cpu" and query.dtype in _HALVES


def _folded(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attend with the query heads of a group folded into the query axis."""
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
    """Return whether `_KERNEL`, which returns its weights, supports these tensors."""
    alike = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    return alike and hasattr(torch.ops.aten, _KERNEL)


def in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend to committed slots without a mask and to new slots with one, then combine both.

    The kernel returns the logarithm of each query's sum of weights, by which the parts combine.

    Args:
        mask: Additive mask [B, 1, n, m] of the last m slots. None if these are the queries' own
            slots and causal.
        sinks: See `with_sinks`.
    """
    batch, heads, n, width = query.shape
    kernel, groups = getattr(torch.ops.aten, _KERNEL), key.shape[1]
    before = key.shape[2] - (n if mask is None else mask.shape[3])
    new = key[:, :, before:], value[:, :, before:]
    out, weight = _kernel(query, *new, mask, mask is None, scaling)
    if before:
        folded = query.reshape(batch, groups, heads // groups * n, width)
        old, old_weight = kernel(folded, key[:, :, :before], value[:, :, :before], scale=scaling)
        old, old_weight = old.reshape(batch, heads, n, width), old_weight.reshape(batch, heads, n)
        share = torch.sigmoid(weight - old_weight)[..., None]
        out = torch.lerp(old.to(share.dtype), out.to(share.dtype), share)
        weight = weight if sinks is None else torch.logaddexp(weight, old_weight)
    return with_sinks(out, weight, sinks).to(query.dtype)


def with_sinks(out: Tensor, weight: Tensor, sinks: Tensor | None) -> Tensor:
    """Scale an attention output [B, heads, n, width] by its share beside attention sinks.

    Args:
        weight: Logarithms of the sums of weights without sinks [B, heads, n].
        sinks: Logits of the sinks [heads], None for none.
    """
    if sinks is None:
        return out
    share = torch.sigmoid(weight - sinks.reshape(1, -1, 1).to(weight.dtype))[..., None]
    return out.to(share.dtype) * share


def _kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    causal: bool,
    scaling: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend by `_KERNEL`; return the output and log weights [B, heads, n], see `in_parts`."""
    batch, heads, n, _ = query.shape
    kernel = getattr(torch.ops.aten, _KERNEL)
    query, key, value = _grouped(query, key, value)
    mask = _for_groups(mask, batch, key.shape[0] // batch)
    out, weight = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, n, -1), weight.reshape(batch, heads, n)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B * groups, share, n, width] and their keys and values, expanded views."""
    share = query.shape[1] // key.shape[1]
    folded = query.reshape(-1, share, *query.shape[2:])
    key, value = (each.flatten(0, 1)[:, None].expand(-1, share, -1, -1) for each in (key, value))
    return folded, key, value


def _for_groups(mask: Tensor | None, batch: int, groups: int) -> Tensor | None:
    """Return a mask [B or 1, 1, n, S] for `_grouped` queries; a view for one row or group."""
    if mask is None or mask.shape[0] == 1 or groups == 1:
        return mask
    return mask.expand(batch, groups, -1, -1).reshape(batch * groups, 1, *mask.shape[2:])


def behind(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend causally by CUDA's kernels; the queries' own slots are the last ones.

    Both kernels align the triangle to the last query and key and need no mask.
    """
    n, slots, shape = query.shape[2], key.shape[2], query.shape
    shared = query.shape[1] != key.shape[1]
    if shared and query.dtype not in _HALVES:  # the float32 kernel does not support groups
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
    """Attend by `_KERNEL` with a mask [B or 1, 1, n, S], without repeating keys."""
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
    """Attend by plain matrix products, for features that the fused kernels lack.

    Long prompts are computed in blocks of queries, so that at most `SCORES` weights are held.

    Args:
        causal: The last query attends to all slots, each query before it to one less.
    """
    batch, heads, n, width = query.shape
    groups, slots = key.shape[1], key.shape[2]
    size = max(16, SCORES // (batch * heads * slots))
    if n > size:
        parts = []
        for start in range(0, n, size):
            end = min(n, start + size)
            visible = slots - n + end if causal else slots
            rows = None if mask is None else mask[:, :, start:end]
            block = query[:, :, start:end], key[:, :, :visible], value[:, :, :visible]
            parts.append(explicit(*block, rows, causal, scaling, softcap, sinks))
        return torch.cat(parts, dim=2)
    scale = width**-0.5 if scaling is None else scaling
    folded = query.reshape(batch, groups, heads // groups * n, width)
    scores = (folded @ key.transpose(2, 3)).reshape(batch, heads, n, slots) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if causal:
        triangle = torch.ones(n, slots, dtype=torch.bool, device=query.device).tril(slots - n)
        scores = scores.masked_fill(~triangle, float("-inf"))
    elif mask is not None:
        scores = scores + mask
    if sinks is not None:
        column = sinks.reshape(1, -1, 1, 1).expand(batch, -1, n, 1).to(scores.dtype)
        scores = torch.cat([scores, column], dim=-1)
    work = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=work)[..., :slots].to(value.dtype)
    out = weights.reshape(batch, groups, -1, slots) @ value
    return out.reshape(batch, heads, n, -1)
