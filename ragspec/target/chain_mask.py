"""Masks of long chains of queries that are not spelled out: what a block of queries sees, at most.

A prompt of n tokens behind S slots has a mask of n x S entries, though under a window of w each
block of queries sees no more than the w slots before it and its own. `ChainMask` stands for such a
mask. The attention of this package asks it for one block after the other; to all other code it is
a tensor that spells itself out when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function

BLOCK = 256  # queries on a CPU: larger ones see more that is masked, smaller ones fill no kernel
LARGE_BLOCK = 1024  # elsewhere, where every block is a launch
KEPT_BYTES = 32 << 20  # of masks, for the next layers
MaskFunction = Callable[..., torch.Tensor]


@dataclass(frozen=True, slots=True)
class Block:
    """Queries `start` to `end` of a forward, and the slots `first` to `last` that they may see."""

    start: int
    end: int
    first: int
    last: int


class ChainMask(torch.Tensor):
    """The additive mask [B, 1, n, S] of chains whose tokens lie at the slots of their positions.

    rule: says which slot each query sees, as the mask functions of transformers do. starts i64 [B],
    or [1] where all rows begin at one slot: slot of each row's first query. local: slots that a
    query sees at most, itself and those right before it; None for all before it.
    """

    rule: MaskFunction
    starts: torch.Tensor
    local: int | None
    _low: int
    _high: int
    _kept: dict[Block, tuple[Block, torch.Tensor | None]]

    # What is made of it are plain tensors.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        rule: MaskFunction,
        starts: torch.Tensor,
        shape: tuple[int, int, int],
        local: int | None,
        dtype: torch.dtype,
        ends: tuple[int, int] | None = None,
    ) -> ChainMask:
        """Return a mask of (B, n, S) entries that takes no memory; see the class.

        ends: the least and the largest of `starts`, where they are known.
        """
        rows, n, slots = shape
        made: ChainMask = torch.Tensor._make_wrapper_subclass(
            cls, (rows, 1, n, slots), dtype=dtype, device=starts.device
        )
        made.rule, made.starts, made.local = rule, starts, local
        made._low, made._high = ends or (int(starts.min()), int(starts.max()))
        made._kept = {}
        return made

    def __init__(self, *arguments: Any) -> None:
        """Nothing is left to do."""

    def blocks(self, size: int) -> Iterator[Block]:
        """Yield blocks of at most `size` queries, cut at slots that are multiples of it.

        So that no block lies across the border of two chunks, where these are multiples too.
        """
        n, slots = self.shape[2:]
        cuts = [0, *range(size - self._low % size, n, size), n]
        for start, end in pairwise(cuts):
            first = 0 if self.local is None else max(0, self._low + start - self.local + 1)
            yield Block(start, end, first, min(slots, self._high + end))

    def of(self, block: Block) -> tuple[Block, torch.Tensor | None]:
        """Return a block less the slots that it does not see, and its additive mask over the rest.

        The mask is [B or 1, 1, queries, slots]; None where the last query sees all of these slots,
        and each one before it one less.
        """
        if self.rule is causal_mask_function and self._low == self._high:
            return block, None
        if block in self._kept:
            return self._kept[block]
        allowed = self._allowed(block)
        unseen = int(allowed.any(2).any(0).to(torch.uint8).argmax())  # slots before the first seen
        seen, allowed = replace(block, first=block.first + unseen), allowed[..., unseen:]
        mask = None if self._is_causal(seen, allowed) else _additive(allowed, self.dtype)
        known = [kept for _, kept in self._kept.values() if kept is not None]
        if mask is not None:
            mask = next((each for each in known[-1:] if torch.equal(each, mask)), mask)
        distinct = {id(each): each.nbytes for each in known}
        taken = 0 if mask is None or id(mask) in distinct else mask.nbytes
        if sum(distinct.values()) + taken <= KEPT_BYTES:
            self._kept[block] = seen, mask
        return seen, mask

    def spelled_out(self) -> torch.Tensor:
        """Return the whole mask as a plain tensor [B, 1, n, S]."""
        rows, _, n, slots = self.shape
        whole = _additive(self._allowed(Block(0, n, 0, slots)), self.dtype)
        return whole.expand(rows, 1, -1, -1).contiguous()

    def _allowed(self, block: Block) -> torch.Tensor:
        """Ask the rule about a block: bool [B or 1, 1, queries, slots]."""
        device, rows = self.starts.device, len(self.starts)
        batch = torch.arange(rows, device=device)[:, None, None, None]
        head = torch.zeros(1, 1, 1, 1, dtype=torch.int64, device=device)
        places = torch.arange(block.start, block.end, device=device)
        queries = (self.starts[:, None] + places)[:, None, :, None]
        slots = torch.arange(block.first, block.last, device=device)
        allowed = self.rule(batch, head, queries, slots[None, None, None])
        return allowed.expand(rows, 1, len(places), len(slots))

    def _is_causal(self, block: Block, allowed: torch.Tensor) -> bool:
        if self._low != self._high or block.last != self._low + block.end:
            return False
        n, slots = allowed.shape[2:]
        return torch.equal(allowed, torch.ones_like(allowed).tril(slots - n))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run an operation on the spelled-out mask; a copy to another device is not one."""
        given = dict(kwargs or {})
        if func is torch.ops.aten._to_copy.default:
            mask, device = args[0], given.get("device")
            if device is not None and given.get("dtype") in (None, mask.dtype):
                return mask._moved(device)
        spelled = tree_map(_plain, (args, given))
        return func(*spelled[0], **spelled[1])

    def _moved(self, device: torch.device) -> ChainMask:
        rows, _, n, slots = self.shape
        shape, ends = (rows, n, slots), (self._low, self._high)
        return ChainMask(self.rule, self.starts.to(device), shape, self.local, self.dtype, ends)


def _plain(given: Any) -> Any:
    return given.spelled_out() if isinstance(given, ChainMask) else given


def _additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return mask.masked_fill_(~allowed, float("-inf"))
