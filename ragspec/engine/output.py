"""Generations, and the pieces of a growing text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ragspec.reports.report import Report
from ragspec.rules.base import Step
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.text_output import TextOutput


@dataclass(slots=True)
class Generation:
    """One finished text.

    Attributes:
        text: Without stop strings and special tokens; "" without a tokenizer.
        tokens: All emitted ids, an end token included.
        finish_reason: "stop", "length", "paused" (see `Options`), "cancelled", or "refused" if a
            pipeline did not call the model.
        label: The guarantee of the output: exact, exact-for(distribution), bounded(tv<=x) or
            approximate.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    label: str
    report: Report
    prompt_tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    steps: list[Step] = field(default_factory=list)
    sample: int = 0


class TextChunks:
    """Cuts a growing text into pieces, and holds back characters that may begin a stop string.

    Args:
        stops: Strings that end the text and never appear.
        written: Tokens whose text was returned before.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str], written: Sequence[int] = ()) -> None:
        self._text = TextOutput(tokenizer)
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._text.push(written)
        self._inputs = max(0, len(self._text.text) - self._held)  # characters returned so far

    def push(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a step."""
        self._text.push(tokens)

    def new(self, whole: str | None = None) -> str:
        """Return the text that was not returned yet; pass the `whole` text once it has ended."""
        text = self._text.text[: max(0, len(self._text.text) - self._held)]
        if whole is not None:
            text = whole
        piece, self._inputs = text[self._inputs :], max(self._inputs, len(text))
        return piece
