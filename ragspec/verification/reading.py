"""Long prompts are read in pieces, one forward each, so that somebody can be told how far it is.

The pieces lie one behind the other in the speculative slots of the cache and are committed
together, as if there had been one forward; each attends to those before it. Activations and masks
are as large as a piece asks for and not as the prompt does: that is why accelerators read in pieces
too, of a size at which a forward takes far longer than its launches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from ragspec.verification.tree_attention import TreeView

PIECE = 512  # tokens that a CPU reads at once
LARGE_PIECE = 2048  # and an accelerator
LONG = 256  # tokens of a chain whose ancestors are not worth a table of n x n
States = Tensor | None
Forward = Callable[[Tensor, TreeView, int | Tensor], tuple[Tensor, States]]
OnRead = Callable[[int, int], None]


def piece_of(device: torch.device) -> int:
    """Return how many tokens of a prompt a device reads at once."""
    return PIECE if device.type == "cpu" else LARGE_PIECE


def chunks(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the beginnings and ends of n tokens cut into even pieces of at most `most`."""
    count = -(-n // most)
    for i in range(count):
        yield i * n // count, (i + 1) * n // count


def in_chunks(view: TreeView, most: int | None) -> bool:
    """Tell whether a forward can be cut: it is long, and its rows are chains."""
    plain = view.related is None and not view.unused
    return most is not None and plain and view.positions.shape[1] > most


def read_in_chunks(
    forward: Forward,
    tokens: Tensor,
    view: TreeView,
    keep: int | Tensor,
    most: int,
    on_read: OnRead | None,
) -> tuple[Tensor, States]:
    """Return what `forward` would of all tokens i64 [B, n], read `most` at a time.

    keep: the number of last queries whose logits are wanted, or i64 [k], ascending. on_read: called
    with how many tokens have been read and of how many, first with 0. Returns logits [B, k, V] and,
    where the forward gives them, states [C, B, k, H].
    """
    n = tokens.shape[1]
    positions = torch.arange(n - keep, n) if isinstance(keep, int) else keep
    logits: list[Tensor] = []
    states: list[Tensor] = []
    if on_read is not None:
        on_read(0, n)
    for start, end in chunks(n, most):
        current = positions[(positions >= start) & (positions < end)] - start
        part = replace(
            view,
            positions=view.positions[:, start:end],
            slot_positions=view.slot_positions[:, :end],
        )
        result, hidden = forward(tokens[:, start:end], part, current if len(current) else 1)
        if len(current):
            logits.append(result)
            states += [] if hidden is None else [hidden]
        if on_read is not None:
            on_read(end, n)
    return torch.cat(logits, 1), torch.cat(states, 2) if states else None


class HeadInputs:
    """Keeps what an output head reads last inside the block; serves block after block.

    head: the module that makes logits out of hidden states; it is left as it was found. Other
    threads may use it meanwhile: what they read is not kept. last_alone: the head then makes logits
    of the last states only, which are cheaper than those of a whole text.
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
        """Return the states [R, n, H] of the last block, None where the head had no part in it."""
        states, self._states = self._states, None
        return states

    def _take(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread:
            return None
        self._states = arguments[0].detach()
        return (arguments[0][:, -1:], *arguments[1:]) if self._last_alone else None
