"""The target's best tokens at every position, for drafters that learn from them.

A drafter that sets `top_logits` to k > 0 is lent `Step.best` with every step, and its sessions may
have `observe_prompt(tokens, top)`, called once with what the prefill knew, or `observe_tops`, which
is given it where the target made it. Nothing is worked out where no drafter asks, and nothing is
copied to the host unless somebody reads it there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol, runtime_checkable

import torch

from ragspec.draft import Drafter, DraftSession, Ints
from ragspec.largest import best_tokens

LATE = 1 << 17  # scores that may wait on a host: of many steps together they are found in less time


class _Forward:
    """The k best tokens of all rows of a forward i64 [B, n, k]; `host` is the one copy of them."""

    def __init__(self, scores: torch.Tensor, k: int) -> None:
        self._scores: torch.Tensor | None = scores
        self._k = k

    @classmethod
    def of(cls, best: torch.Tensor) -> _Forward:
        """Return the forward whose best tokens are known."""
        known = cls(best, best.shape[-1])
        known.best, known._scores = best, None
        return known

    @cached_property
    def best(self) -> torch.Tensor:
        scores, self._scores = self._scores, None  # nobody needs to hold them any longer
        assert scores is not None
        return best_tokens(scores, self._k)[1]

    @cached_property
    def host(self) -> Ints:
        return self.best.cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class Tops:
    """The best tokens i64 [n, k] of one row of a forward, best first; its length is n.

    They stay on the device of the target until somebody reads them on the host; the rows of a
    forward then share one copy.
    """

    forward: _Forward
    row: int
    count: int

    def __len__(self) -> int:
        return self.count

    @classmethod
    def of(cls, best: torch.Tensor) -> Tops:
        """Return the best tokens [n, k] of a single row."""
        return cls(_Forward.of(best[None]), 0, len(best))

    @classmethod
    def rows(cls, best: torch.Tensor, counts: Sequence[int]) -> list[Tops]:
        """Return the first `counts` of the best tokens [B, n, k] of every row."""
        return cls._shared(_Forward.of(best), counts)

    @classmethod
    def ranked(cls, logits: torch.Tensor, k: int, counts: Sequence[int], kept: bool) -> list[Tops]:
        """Return the k best tokens of the first `counts` positions of logits [B, n, V].

        kept: nobody changes the logits, so that on a host the search may wait for a reader.
        """
        if kept and logits.device.type == "cpu" and logits.numel() <= LATE:
            return cls._shared(_Forward(logits, k), counts)
        return cls.rows(best_tokens(logits, k)[1], counts)

    @classmethod
    def _shared(cls, forward: _Forward, counts: Sequence[int]) -> list[Tops]:
        return [cls(forward, row, count) for row, count in enumerate(counts)]

    def there(self) -> torch.Tensor:
        """Return them where the target made them: i64 [n, k]."""
        return self.forward.best[self.row, : self.count]

    def host(self) -> Ints:
        """Return them on the host: i64 [n, k], not to be changed."""
        return self.forward.host[self.row, : self.count]


@runtime_checkable
class LearnsFromPrompt(Protocol):
    """The optional part of a draft session that hears of the prefill."""

    def observe_prompt(self, tokens: Ints, top: Ints) -> None:
        """Learn the best tokens i64 [T, k] after each of the prompt's last T tokens i64 [T]."""
        ...


@runtime_checkable
class LearnsThere(Protocol):
    """The optional part of a draft session that hears of it without a copy to the host."""

    def observe_tops(self, tokens: Ints, tops: Tops) -> None:
        """Learn the best tokens after each of the prompt's last T tokens i64 [T]."""
        ...


@runtime_checkable
class ReadsPrompts(Protocol):
    """The optional part of a target session that tells more about prompts than their ends."""

    def read_prompts(
        self, pending: Sequence[Sequence[int]], k: int
    ) -> tuple[torch.Tensor, list[Tops]]:
        """Verify empty trees; return logits [B, 1, V] and what the target thought on the way.

        That is, for each row, its k best tokens after the last T' tokens of the prompt, where T'
        may be smaller than the prompt, 0 included. No rows where k is 0.
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


def tell_prompt(session: DraftSession | None, tokens: Ints, top: Ints | Tops) -> None:
    """Hand on the prefill's best tokens to a session that has a use for them, in its form."""
    if isinstance(top, Tops) and isinstance(session, LearnsThere):
        session.observe_tops(tokens, top)
    elif isinstance(session, LearnsFromPrompt):
        session.observe_prompt(tokens, top.host() if isinstance(top, Tops) else top)
