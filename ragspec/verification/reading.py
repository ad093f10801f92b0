"""The size of the chunks in which prompts are read, and the hidden states of a forward."""

from __future__ import annotations

import threading
from typing import Any, Self

import torch
from torch import Tensor, nn

PIECE = 512  # tokens of a chunk on a CPU
LARGE_PIECE = 2048  # tokens of a chunk on an accelerator
LONG = 256  # tokens of a chain from which on its n x n table of ancestors costs too much


def piece_of(device: torch.device) -> int:
    """Return the chunk size of a device, in tokens."""
    return PIECE if device.type == "cpu" else LARGE_PIECE


class HeadInputs:
    """Records the last hidden states that an output head reads inside the block; reusable.

    Calls of the head from other threads are not recorded.

    Args:
        head: The module that computes logits of hidden states. It is not changed.

    Attributes:
        selected: Positions whose logits the head computes, i64 [k]; None for all that it reads.
    """

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self.selected: Tensor | None = None
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
        # A compiler cannot trace the identity of a thread.
        if not torch.compiler.is_compiling() and threading.get_ident() != self._thread:
            return None
        self._states = arguments[0].detach()
        if self.selected is None:
            return None
        return (arguments[0][:, self.selected], *arguments[1:])
