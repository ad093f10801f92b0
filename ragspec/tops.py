"""The target's best tokens at every position, for drafters that learn from them.

A drafter that sets `top_logits` to k > 0 is lent `Step.top` with every step, and its sessions may
have `observe_prompt(tokens, top)`, called once with what the prefill knew. Nothing is worked out
where no drafter asks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

import torch

from ragspec.draft import Drafter, DraftSession, Ints


@runtime_checkable
class LearnsFromPrompt(Protocol):
    """The optional part of a draft session that hears of the prefill."""

    def observe_prompt(self, tokens: Ints, top: Ints) -> None:
        """Learn the best tokens i64 [T, k] after each of the prompt's last T tokens i64 [T]."""
        ...


@runtime_checkable
class ReadsPrompts(Protocol):
    """The optional part of a target session that tells more about prompts than their ends."""

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[torch.Tensor, list[Ints]]:
        """Verify empty trees; return logits [B, 1, V] and what the target thought on the way.

        That is, for each row, its k best tokens after the last T' tokens of the prompt: i64
        [T', k], where T' may be smaller than the prompt, 0 included. No rows where k is 0.
        """
        ...


def wanted(drafters: Iterable[Drafter | None]) -> int:
    """Return the largest k that any of the drafters declares as `top_logits`; 0 for none."""
    return max((int(getattr(drafter, "top_logits", 0)) for drafter in drafters), default=0)


def reads_prompts(drafters: Iterable[Drafter | None]) -> bool:
    """Tell whether a drafter wants the best tokens of the prompt too, which the prefill must pay.

    A drafter that declares `top_logits` does, unless its `reads_prompt` is False.
    """
    asking = (each for each in drafters if getattr(each, "top_logits", 0))
    return any(getattr(each, "reads_prompt", True) for each in asking)


def tell_prompt(session: DraftSession | None, tokens: Ints, top: Ints) -> None:
    """Hand on the prefill's best tokens to a session that has a use for them."""
    if isinstance(session, LearnsFromPrompt):
        session.observe_prompt(tokens, top)
