"""Chunked prefill: long prompts are read in chunks, one forward each, with progress reports.

The chunks fill consecutive speculative slots of the cache and are committed together, as if by one
forward. Each chunk attends to those before it. Activations and masks have the size of a chunk
instead of the prompt. For that reason accelerators read in chunks too, large enough that a forward
takes far longer than its kernel launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ragspec.verification.tree_attention import TreeView

PIECE = 512  # tokens of a chunk on a CPU
LARGE_PIECE = 2048  # tokens of a chunk on an accelerator
LONG = 256  # tokens of a chain from which on its n x n table of ancestors costs too much
States = Tensor | None
Forward = Callable[[Tensor, TreeView, int | Tensor], tuple[Tensor, States]]
OnRead = Callable[[int, int], None]


def piece_of(device: torch.device) -> int:
    """Return the chunk size of a device, in tokens."""
    return PIECE if device.type == "cpu" else LARGE_PIECE


def chunks(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the starts and ends of n tokens cut into even chunks of at most `most`."""
    count = -(-n // most)
    for i in range(count):
        yield i * n // count, (i + 1) * n // count


def in_chunks(view: TreeView, most: int) -> bool:
    """Return whether a forward needs chunks of at most `most` and is a chain in every row."""
    return view.related is None and not view.unused and view.positions.shape[1] > most


def read_in_chunks(
    forward: Forward,
    tokens: Tensor,
    view: TreeView,
    keep: int | Tensor,
    most: int,
    on_read: OnRead | None,
) -> tuple[Tensor, States]:
    """Run `forward` over tokens i64 [B, n] in chunks of at most `most`.

    Args:
        keep: The number of last queries whose logits are returned, or their indices i64 [k],
            ascending.
        on_read: Called with the tokens read and their total, first with 0.

    Returns:
        Logits [B, k, V], and hidden states [C, B, k, H] if `forward` returns them.
    """
    n = tokens.shape[1]
    positions = torch.arange(n - keep, n) if isinstance(keep, int) else keep
    logits: list[Tensor] = []
    states: list[Tensor] = []
    if on_read is not None:
        on_read(0, n)
    for start, end in chunks(n, most):
        queries = positions[(positions >= start) & (positions < end)] - start
        part = replace(
            view,
            positions=view.positions[:, start:end],
            slot_positions=view.slot_positions[:, :end],
        )
        chunk, hidden = forward(tokens[:, start:end], part, queries if len(queries) else 1)
        if len(queries):
            logits.append(chunk)
            states += [] if hidden is None else [hidden]
        if on_read is not None:
            on_read(end, n)
    return torch.cat(logits, 1), torch.cat(states, 2) if states else None


class HeadInputs:
    """Records the last hidden states that an output head reads inside the block; reusable.

    Calls of the head from other threads are not recorded.

    Args:
        head: The module that computes logits of hidden states. It is not changed.
        last_alone: Whether the head computes only the last logits, which is cheaper.
    """

    def __init__(self, head: nn.Module, *, last_alone: bool = False) -> None:
        self._head = head
        self._last_alone = last_alone
        self._states: Tensor | None = None
        self._thread: int | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._states, self._thread = None, threading.get_ident()
        self._hook = self._head.register_forward_pre_hook(self._take)
        return self

    def __exit__(self, *raised: object) -> None:
        self._hook.remove()
        self._hook = None

    def taken(self) -> Tensor | None:
        """Return the states [R, n, H] of the last block, None if the head was not called."""
        states, self._states = self._states, None
        return states

    def _take(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread:
            return None
        self._states = arguments[0].detach()
        return (arguments[0][:, -1:], *arguments[1:]) if self._last_alone else None
