"""Where the tokens of a text begin in it: log-probabilities are told of the text alone."""

from __future__ import annotations

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
    """A token's log-probability. offset: the character of its text that it begins with."""

    scored: TokenLogprob
    offset: int


class TokenOffsets:
    """Places the tokens of one text as they come."""

    def __init__(self, tokenizer: Any) -> None:
        self._text = TextOutput(tokenizer)
        self._waiting: deque[Placed] = deque()
        self._taken = 0

    def upto(self, end: int, scored: Sequence[TokenLogprob]) -> list[Placed]:
        """Return the tokens that begin before character `end` and were not returned before.

        scored: all tokens that are known by now. One that `end` cuts is among them.
        """
        self._push(scored)
        results = []
        while self._waiting and self._waiting[0].offset < end:
            results.append(self._waiting.popleft())
        return results

    def rest(self, generation: Generation) -> list[Placed]:
        """Return the tokens that are left of a text that has ended, without those of its stop."""
        scored = generation.logprobs or ()
        self._push(scored)
        if generation.finish_reason == "stop" and len(self._text.text) > len(generation.text):
            return self.upto(len(generation.text), scored)
        result = list(self._waiting)
        self._waiting.clear()
        return result

    def _push(self, scored: Sequence[TokenLogprob]) -> None:
        new = scored[self._taken :]
        self._taken += len(new)
        for each in new:
            self._waiting.append(Placed(each, len(self._text.text)))
            self._text.push([each.token])
