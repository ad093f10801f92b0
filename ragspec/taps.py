"""The target's last hidden states, as its output head reads them, for drafters that use them.

A drafter that sets `needs_hidden` is lent `Step.hidden` with every step, and its sessions may have
`observe_hidden(tokens, hidden)`, called once with what the prefill knew. Nothing is kept where no
drafter asks, and a model carries a hook only while a session that keeps them is open.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import nn

from ragspec.draft import Drafter, DraftSession, Ints


@runtime_checkable
class LearnsFromHidden(Protocol):
    """The optional part of a draft session that hears of the prompt's hidden states."""

    def observe_hidden(self, tokens: Ints, hidden: torch.Tensor) -> None:
        """Learn the states [copies, T, H] at the prompt's last T tokens i64 [T]; they are lent."""
        ...


@runtime_checkable
class KeepsHidden(Protocol):
    """The optional part of a target session that keeps what its output head reads.

    hidden: of the last forward, for each row [copies, n, H]: after `verify` at the root and the
    nodes (what lies beyond a row's own is undefined), after `read_prompts` at the prompt's last n
    tokens. copies: the cache rows of a sequence, 2 with guidance, the conditional one first.
    """

    hidden: list[torch.Tensor]

    def keep_hidden(self) -> None:
        """Keep the states of all forwards from now on."""
        ...


def needs_hidden(drafters: Iterable[Drafter | None]) -> bool:
    """Tell whether any of the drafters declares `needs_hidden`."""
    return any(getattr(drafter, "needs_hidden", False) for drafter in drafters)


def tell_hidden(session: DraftSession | None, tokens: Ints, hidden: torch.Tensor) -> None:
    """Hand on the prompt's hidden states to a session that has a use for them."""
    if isinstance(session, LearnsFromHidden):
        session.observe_hidden(tokens, hidden)


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
