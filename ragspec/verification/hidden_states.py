"""The target's last hidden states, as its output head reads them, for drafters that use them.

Nothing is kept where no drafter asks, and a model carries a hook only during the forwards of a
session that keeps them.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn


class HeadInputs:
    """Keeps what an output head reads last inside the block; serves block after block.

    head: the module that makes logits out of hidden states; it is left as it was found. Other
    threads may use it meanwhile: what they read is not kept. last_alone: the head then makes logits
    of the last states only, which are cheaper than those of a whole text.
    """

    def __init__(self, head: nn.Module, *, last_alone: bool = False) -> None:
        self._head = head
        self._last_alone = last_alone
        self._states: torch.Tensor | None = None
        self._thread: int | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._states, self._thread = None, threading.get_ident()
        self._hook = self._head.register_forward_pre_hook(self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()
        self._hook = None

    def taken(self) -> torch.Tensor | None:
        """Return the states [R, n, H] of the last block, None where the head had no part in it."""
        states, self._states = self._states, None
        return states

    def _take(self, module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if threading.get_ident() != self._thread:
            return None
        self._states = arguments[0].detach()
        return (arguments[0][:, -1:], *arguments[1:]) if self._last_alone else None
