"""Log-probabilities of tokens with their places in the text."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.text_output import TextOutput


@dataclass(frozen=True, slots=True)
class PlacedToken:
    """A token, the character at which it begins in the text, and its part of the text.

    The parts join to the text: a character of several tokens belongs to the last one, and a token
    that a stop string cuts has the part before the cut.
    """

    scored: TokenLogprob
    start: int
    part: str


class PlacedOutput(TextOutput):
    """A growing text, and the tokens that end in each piece of it.

    Args:
        tokenizer, prompt, stops: See `TextOutput`.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], stops: Sequence[str] = ()) -> None:
        super().__init__(tokenizer, prompt, stops, placed=True)
        self._returned = 0  # tokens

    def ended(self, scored: Sequence[TokenLogprob], text: str) -> list[PlacedToken]:
        """Return the tokens that were not returned before and end in the first part of the text.

        Args:
            scored: The log-probabilities of all tokens so far.
            text: That part: all pieces so far.
        """
        count = bisect_right(self.starts, len(text), 1) - 1
        return self._between(scored[:count], self.starts[: count + 1], text)

    def rest(
        self, scored: Sequence[TokenLogprob], text: str, finish_reason: str
    ) -> list[PlacedToken]:
        """Return the tokens of a whole text that were not returned before.

        Those of a stop string that begin after the cut are left out.
        """
        end = len(text)
        if finish_reason == "stop" and self.starts[-1] > end:  # a stop string cut the text
            scored = [each for each, at in zip(scored, self.starts, strict=False) if at < end]
        return self._between(scored, [*self.starts[: len(scored)], end], text)

    def _between(
        self, scored: Sequence[TokenLogprob], starts: Sequence[int], text: str
    ) -> list[PlacedToken]:
        first, self._returned = self._returned, max(self._returned, len(scored))
        bounds = pairwise(starts[first:])
        tokens = zip(scored[first:], bounds, strict=True)
        return [PlacedToken(token, start, text[start:end]) for token, (start, end) in tokens]


def place_tokens(tokenizer: Any, generation: Any) -> list[PlacedToken]:
    """Return the tokens of a `Generation` with log-probabilities, see `PlacedOutput.rest`."""
    output = PlacedOutput(tokenizer, generation.prompt_tokens)
    output.push([each.token for each in generation.logprobs])
    return output.rest(generation.logprobs, generation.text, generation.finish_reason)
