"""The target's last hidden states, as its output head reads them, for drafters that use them.

Nothing is kept where no drafter asks, and a model carries a hook only while a session that keeps
them is open.
"""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn


class HeadTap:
    """Keeps what an output head reads in one forward after each `listen`.

    head: the module that makes logits out of hidden states; it is left as it was found. Other
    threads may use it meanwhile: what they read is not kept.
    """

    def __init__(self, head: nn.Module) -> None:
        self.states: torch.Tensor | None = None
        self._head = head
        self._thread: int | None = None
        self._hook: Any = None

    def __enter__(self) -> Self:
        self._hook = self._head.register_forward_pre_hook(self._take)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._hook.remove()
        self.states = None

    def listen(self) -> None:
        """Keep what the next forward of this thread brings to the head."""
        self.states, self._thread = None, threading.get_ident()

    def taken(self) -> torch.Tensor | None:
        """Return the states [R, n, H] of that forward, None where the head had no part in it."""
        states, self.states, self._thread = self.states, None, None
        return states

    def _take(self, module: nn.Module, arguments: tuple[Any, ...]) -> None:
        if threading.get_ident() == self._thread:
            self.states = arguments[0].detach()
