"""Log-probabilities of tokens with their places in the text."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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


def place(
    output: TextOutput,
    scored: Sequence[TokenLogprob],
    text: str,
    finish_reason: str | None = None,
    first: int = 0,
) -> list[PlacedToken]:
    """Return the tokens from number `first` on that end in the first part of a text.

    Of a whole text they are all, but those of a stop string that begin after the cut.

    Args:
        output: The text with the places of its tokens.
        scored: The log-probabilities of all tokens so far.
        text: The first part: all pieces so far.
        finish_reason: That of the text if it is whole.
    """
    starts, end = output.starts, len(text)
    if finish_reason is None:
        count = bisect_right(starts, end, 1) - 1
        end = starts[count]
    elif finish_reason == "stop" and starts[-1] > end:  # a stop string cut the text
        count = bisect_left(starts, end)
    else:
        count = len(scored)
    bounds = pairwise([*starts[first:count], end])
    tokens = zip(scored[first:count], bounds, strict=True)
    return [PlacedToken(token, start, text[start:end]) for token, (start, end) in tokens]
