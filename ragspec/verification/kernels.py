"""Attention kernels: fused where possible, with separate attention to committed slots if long.

Shapes throughout: query [B, heads, n, width], key and value [B, groups, S, width], output
[B, heads, n, width]. Keys, values and masks are not repeated for query heads that share a key head.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

_HALVES = (torch.bfloat16, torch.float16)
_KERNEL = "_scaled_dot_product_flash_attention_for_cpu"  # called by sdpa; returns weights as well
SCORES = 1 << 25  # attention weights that `explicit` holds at once


class AttentionForm(NamedTuple):
    """The inputs of an attention beside queries, keys and values.

    Attributes:
        mask: Additive mask [B, 1 or heads, n, S].
        causal: Without a mask: the last query attends to all slots, each before it to one less.
        scaling: Factor of the scores; None for that of the width.
        softcap: Bound of the scores.
        sinks: Logits of the attention sinks [heads].
    """

    mask: Tensor | None = None
    causal: bool = False
    scaling: float | None = None
    dropout: float = 0.0
    softcap: float | None = None
    sinks: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """Attend by sdpa, which chooses the kernel, without soft-cap and sinks."""
    mask, causal, scaling, dropout, *_ = form
    shared = query.shape[1] != key.shape[1]
    on_cpu = query.device.type == "cpu"
    if not shared and query.shape[2] == 1 and on_cpu and query.dtype in _HALVES:
        # Two equal queries are faster than one. Measured in bfloat16: over 800 keys 0.10 ms for two
        # and 0.37 ms for one, over 8,000 keys 2.8 and 6.4 ms.
        twice = query.expand(-1, -1, 2, -1)
        return sdpa(twice, key, value, mask, dropout, scale=scaling)[:, :, :1]
    # Repeating the mask of many queries costs more than repeating keys and values.
    many = on_cpu and query.shape[2] > 2 * query.shape[3]
    if many and shared and mask is not None and mask.shape[1] == 1 and joins(query, value):
        return by_weights(query, key, value, form)
    if many or causal or not shared:
        options = {"is_causal": causal, "enable_gqa": shared}
        return sdpa(query, key, value, mask, dropout, scale=scaling, **options)
    folded, mask = _fold(query, key.shape[1], mask)
    return sdpa(folded, key, value, mask, scale=scaling).reshape(*query.shape[:3], -1)


def _fold(query: Tensor, groups: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return queries [B, groups, share * n, width], and their mask."""
    batch, heads, n, width = query.shape
    if mask is not None and mask.shape[1] == heads:
        mask = mask.reshape(mask.shape[0], groups, heads // groups * n, -1)
    elif mask is not None:
        mask = mask.expand(batch, 1, n, -1).repeat(1, 1, heads // groups, 1)
    return query.reshape(batch, groups, heads // groups * n, width), mask


def joins(query: Tensor, value: Tensor) -> bool:
    """Return whether `_KERNEL`, which returns its weights, supports these tensors."""
    alike = query.device.type == "cpu" and query.shape[-1] == value.shape[-1]
    return alike and hasattr(torch.ops.aten, _KERNEL)


Weighted = tuple[Tensor, Tensor]  # an output, and the logarithms of its sums of weights


def by_weights(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
    """Attend with a logit soft-cap, attention sinks or a narrow mask; see `weighted`."""
    out, weight = weighted(query, key, value, form)
    return with_sinks(out, weight, form.sinks).to(query.dtype)


def weighted(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Weighted:
    """Return the attention to some slots and its log weights [B, heads, n], see `joined`.

    The mask covers the last slots; all slots before them are visible. Sinks are left out.
    """
    mask, causal, scaling, _, softcap, _ = form
    batch, heads, n, width = query.shape
    groups, slots = key.shape[1], key.shape[2]
    before = slots - (mask.shape[3] if mask is not None else n if causal else slots)
    if before:
        last = weighted(query, key[:, :, before:], value[:, :, before:], form)
        first = key[:, :, :before], value[:, :, :before]
        return joined(last, weighted(query, *first, form._replace(mask=None, causal=False)))
    by_head = mask is not None and mask.shape[1] != 1
    if softcap is not None or by_head or not joins(query, value):
        return explicit(query, key, value, form)
    kernel = getattr(torch.ops.aten, _KERNEL)
    if causal or (mask is not None and n > 2 * width):
        query, key, value = _grouped(query, key, value)
        if mask is not None and min(mask.shape[0], groups) > 1:  # else a view does for all
            mask = mask.expand(batch, groups, -1, -1).reshape(batch * groups, 1, *mask.shape[2:])
    else:
        query, mask = _fold(query, groups, mask)
    out, weight = kernel(query, key, value, 0.0, causal, attn_mask=mask, scale=scaling)
    return out.reshape(batch, heads, n, -1), weight.reshape(batch, heads, n)


def joined(new: Weighted, old: Weighted) -> Weighted:
    """Return the attention to two parts of the slots as that to both."""
    (out, weight), (before, old_weight) = new, old
    share = torch.sigmoid(weight - old_weight)[..., None]
    out = torch.lerp(before.to(share.dtype), out.to(share.dtype), share)
    return out, torch.logaddexp(weight, old_weight)


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


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries [B * groups, share, n, width] and their keys and values, expanded views."""
    share = query.shape[1] // key.shape[1]
    key, value = (each.flatten(0, 1)[:, None].expand(-1, share, -1, -1) for each in (key, value))
    return query.reshape(-1, share, *query.shape[2:]), key, value


def behind(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend causally by CUDA's kernels; the queries' own slots are the last ones.

    Both kernels align the triangle to the last query and key and need no mask.
    """
    from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo

    n, slots, shape = query.shape[2], key.shape[2], query.shape
    shared = query.shape[1] != key.shape[1]
    if shared and query.dtype not in _HALVES:  # the float32 kernel does not support groups
        query, key, value = _grouped(query, key, value)
        shared = False
    out = sdpa(query, key, value, causal_lower_right(n, slots), scale=scaling, enable_gqa=shared)
    return out.reshape(*shape[:3], -1)


def explicit(query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Weighted:
    """Attend by plain matrix products, for features that the fused kernels lack; see `weighted`.

    Long prompts are computed in blocks of queries, so that at most `SCORES` weights are held.
    """
    mask, causal, scaling, _, softcap, _ = form
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
            parts.append(explicit(*block, form._replace(mask=rows)))
        return torch.cat([out for out, _ in parts], 2), torch.cat([each for _, each in parts], 2)
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
    work = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, dim=-1, dtype=work).to(value.dtype)
    out = weights.reshape(batch, groups, -1, slots) @ value
    return out.reshape(batch, heads, n, -1), scores.to(work).logsumexp(-1)
