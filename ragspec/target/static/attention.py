"""What the queries of a step attend to, told to the model in one of three ways.

mask    an additive mask over all S slots: what every kernel takes, and reads whole
flex    torch's flex attention: slots behind a row's text are not read, nothing of n x S is made
varlen  committed slots by the flash kernel for lengths of their own, the n new ones by plain
        products, joined by the logarithms of their weights

All are made on the device, by tensors alone. The two last go through a model as its
`attention_mask`, in the class that transformers hands on as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ragspec.errors import InputError, UnsupportedModelError
from ragspec.models.layer_windows import Window
from ragspec.target.kernels import with_sinks
from ragspec.target.static.layout import Counters, Layout, plain_mask, windowed

BLOCK = 128  # slots that flex attention reads or leaves together
_TELLS = "return_aux" in inspect.signature(flex_attention).parameters  # from torch 2.10 on

Attention = Callable[[Layout, torch.Tensor, Counters, Window], Any]


class StepMask(BlockMask):
    """What a step's queries attend to, as something that can be asked to attend."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return [B, heads, n, width] of queries of that shape over keys [B, groups, S, width]."""
        raise NotImplementedError


class FlexMask(StepMask):
    """Blocks of slots, and who sees which of them."""

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend by flex attention; see `StepMask`."""

        def capped(score: torch.Tensor, *places: torch.Tensor) -> torch.Tensor:
            return torch.tanh(score / softcap) * softcap if softcap else score

        options: dict[str, Any] = {
            "score_mod": None if softcap is None else capped,
            "block_mask": self,
            "scale": scaling,
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        if sinks is None:
            alone: torch.Tensor = flex_attention(query, key, value, **options)
            return alone
        found, weight = _with_weights(query, key, value, options)
        return with_sinks(found, weight, sinks).to(query.dtype)


class PartsMask(StepMask):
    """Committed slots by their number, and who sees which of the new ones.

    lengths i64 [B]; columns i64 [B, n]: the new slots; own: additive mask [B, 1, n, n] of them.
    """

    lengths: torch.Tensor
    columns: torch.Tensor
    own: torch.Tensor

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float | None,
        softcap: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend in two parts; see `StepMask`. Raises UnsupportedModelError for a soft cap."""
        if softcap is not None:
            raise UnsupportedModelError("logits with a soft cap cannot be attended to in parts.")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        before, heavy = _committed(query, key, value, self.lengths, scale)
        places = self.columns[:, None, :, None]
        new, light = _dense(
            query,
            key.gather(2, places.expand(-1, key.shape[1], -1, key.shape[3])),
            value.gather(2, places.expand(-1, value.shape[1], -1, value.shape[3])),
            self.own,
            scale,
        )
        some = (self.lengths > 0)[:, None, None]  # rows of padding have committed nothing
        heavy = torch.where(some, heavy, float("-inf"))
        before = torch.where(some[..., None], before.to(new.dtype), 0.0)
        found = torch.lerp(before, new, torch.sigmoid(light - heavy)[..., None])
        return with_sinks(found, torch.logaddexp(light, heavy), sinks).to(query.dtype)


def masked(layout: Layout, last: torch.Tensor, counters: Counters, window: Window) -> torch.Tensor:
    """Return the additive mask [B, 1, n, S]; last i64 [B]: see `lay_out`."""
    return windowed(plain_mask(layout, last, counters), layout, counters, window)[:, None]


def flex(layout: Layout, last: torch.Tensor, counters: Counters, window: Window) -> FlexMask:
    """Return blocks of slots up to the last that a row wrote, and who sees which of them."""
    rows, n = layout.positions.shape
    lengths, slots = last + 1, len(counters.slots)

    def sees(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        behind = slot - lengths[row]
        own = behind.clamp(0, n - 1)
        seen = (behind < 0) | (layout.see[row, query, own] & (behind < n))
        if window.plain:
            return seen
        place = torch.where(behind < 0, slot, layout.positions[row, own])
        return seen & window.reaches(layout.positions[row, query], place)

    blocks = -(-slots // BLOCK)
    used = (lengths + (n + BLOCK - 1)).div(BLOCK, rounding_mode="floor").clamp(max=blocks)
    order = torch.arange(blocks, dtype=torch.int32, device=lengths.device)
    made: FlexMask = FlexMask.from_kv_blocks(  # type: ignore[assignment, unused-ignore]
        used.int()[:, None, None],
        order.expand(rows, 1, 1, -1).contiguous(),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(n, slots),
        compute_q_blocks=False,
    )
    return made


def in_parts(
    layout: Layout, last: torch.Tensor, counters: Counters, window: Window
) -> torch.Tensor | PartsMask:
    """Return committed and new slots apart; a mask where a window cuts through the former.

    The kernel's windows count slots, of which siblings have one each, and not positions.
    """
    if not window.plain:
        return masked(layout, last, counters, window)
    rows, n = layout.positions.shape
    lengths, slots = last + 1, len(counters.slots)
    nothing = torch.zeros(rows, 1, 1, dtype=torch.int32, device=lengths.device)
    made: PartsMask = PartsMask.from_kv_blocks(  # type: ignore[assignment, unused-ignore]
        nothing, nothing[..., None], seq_lengths=(n, slots), compute_q_blocks=False
    )
    made.lengths, made.columns = lengths, layout.columns
    made.own = torch.where(layout.see, counters.zero, counters.never)[:, None]
    return made


ATTENTIONS: dict[str, Attention] = {"mask": masked, "flex": flex, "varlen": in_parts}


def expect_attention(name: str) -> Attention:
    """Return the way of telling; raises InputError for an unknown name."""
    if name not in ATTENTIONS:
        known = ", ".join(map(repr, ATTENTIONS))
        raise InputError(f"got attention={name!r}; expected one of {known}.")
    return ATTENTIONS[name]


def _with_weights(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what flex attention finds, and the logarithm of its weights [B, heads, n]."""
    if _TELLS:
        from torch.nn.attention.flex_attention import AuxRequest

        found, told = flex_attention(query, key, value, **options, return_aux=AuxRequest(lse=True))
        return found, told.lse
    found, weight = flex_attention(query, key, value, **options, return_lse=True)
    return found, weight


def _committed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to the first `lengths` slots, and the logarithm of its weights.

    The buffers are one page a row to the kernel, so that nothing is copied.
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    rows, heads, n, width = query.shape
    row = torch.arange(rows + 1, dtype=torch.int32, device=query.device)
    found, weight = varlen_attn(
        query.transpose(1, 2).reshape(rows * n, heads, width),
        key.transpose(1, 2),
        value.transpose(1, 2),
        row * n,
        None,
        n,
        key.shape[2],
        return_aux=AuxRequest(lse=True),
        scale=scale,
        enable_gqa=heads != key.shape[1],
        seqused_k=lengths.int(),
        block_table=row[:-1, None],
    )
    found = found.view(rows, n, heads, -1).transpose(1, 2)
    return found, weight.view(rows, n, heads).transpose(1, 2)


def _dense(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return attention to n slots by plain products, and the logarithm of its weights.

    In float32 at least: few numbers, which are joined with others.
    """
    batch, heads, n, width = query.shape
    groups, wide = key.shape[1], torch.promote_types(query.dtype, torch.float32)
    queries = query.to(wide).view(batch, groups, heads // groups, n, width)
    scores = scale * queries @ key.to(wide)[:, :, None].transpose(-1, -2) + mask[:, :, None].to(
        wide
    )
    weight = scores.logsumexp(-1)
    found = (scores - weight[..., None]).exp() @ value.to(wide)[:, :, None]
    return found.view(batch, heads, n, -1), weight.view(batch, heads, n)
