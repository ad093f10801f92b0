"""Positions of tokens in their text; log-probabilities of tokens outside the text are dropped."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragspec.sampling.text_output import TextOutput

if TYPE_CHECKING:
    from ragspec.engine.output import Generation
    from ragspec.sampling.settings import TokenLogprob


@dataclass(frozen=True, slots=True)
class Placed:
    """A token's log-probability, with the character at which it begins in the text."""

    scored: TokenLogprob
    offset: int


class TokenOffsets:
    """Computes the positions of the tokens of one text as they come."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextOutput(tokenizer)
        self._waiting: deque[Placed] = deque()
        self._taken = 0

    def upto(self, end: float, scored: Sequence[TokenLogprob]) -> list[Placed]:
        """Return the tokens that begin before character `end` and were not returned before.

        Args:
            scored: All tokens of the text so far, up to the one that contains `end`.
        """
        self._push(scored)
        placed = []
        while self._waiting and self._waiting[0].offset < end:
            placed.append(self._waiting.popleft())
        return placed

    def rest(self, generation: Generation) -> list[Placed]:
        """Return the remaining tokens of a finished text, without those of its stop string."""
        scored = generation.logprobs or ()
        self._push(scored)
        stopped = generation.finish_reason == "stop" and len(self._text.text) > len(generation.text)
        return self.upto(len(generation.text) if stopped else math.inf, scored)

    def _push(self, scored: Sequence[TokenLogprob]) -> None:
        new = scored[self._taken :]
        self._taken += len(new)
        for each in new:
            self._waiting.append(Placed(each, len(self._text.text)))
            self._text.push([each.token])
