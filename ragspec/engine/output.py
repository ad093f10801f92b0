"""Generations, and streams of their text."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from ragspec.engine.options import RowSettings
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


class RunningText(Protocol):
    """The single text of a stream."""

    @property
    def settings(self) -> RowSettings:
        """The settings of the text."""

    def results(self) -> list[list[Generation]]:
        """Return its generation, of a running text the one so far."""


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


class Stream:
    """An iterator over pieces of text, one for each verified step; `result` has the generation.

    `cancel()`, also from another thread, ends the text after the current step, as does an interrupt
    (Ctrl-C) in the iteration or leaving it early. `result` keeps the text written so far. A stop
    string never appears, nor a part of it. If a text pauses, characters that may begin a stop
    string come with the stream that resumes it.
    """

    def __init__(
        self, run: RunningText, passes: Iterator[Any], tokenizer: Any, stops: Sequence[str]
    ) -> None:
        self._run = run
        self._passes = passes
        self._chunks = TextChunks(tokenizer, stops, run.settings.resume_from)
        self._cancelled = threading.Event()
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        # No generator over `self` here: it would be a cycle, and a dropped stream would keep its
        # cache, and the lease on its model, until the next garbage collection.
        try:
            piece = self._advance()
        except BaseException:
            self.close()
            raise
        if piece is None or self._ended:
            self.close()
        if piece is None:
            raise StopIteration
        return piece

    def cancel(self) -> None:
        """End the text after the current step."""
        self._cancelled.set()

    def close(self) -> None:
        """Leave the iteration and free the cache; `result` keeps the text written so far."""
        self._ended = True
        close = getattr(self._passes, "close", None)
        if close is not None:
            close()

    @property
    def result(self) -> Generation:
        """The generation so far; complete once the iteration has ended."""
        return self._run.results()[0][0]

    def _advance(self) -> str | None:
        """Return the next piece that is not empty, or None at the end."""
        while not self._ended:
            emissions = next(self._passes, None)
            if emissions is None:
                return None
            if not emissions:
                continue
            for emission in emissions:
                self._chunks.push(emission.step.tokens)
            row = emissions[-1].row
            # Text is no longer held back once nothing can follow it.
            self._ended = row.done
            if self._cancelled.is_set():
                self.close()
            whole = self._ended and row.stop.reason != "paused"
            piece = self._chunks.new(self.result.text if whole else None)
            if piece:
                return piece
        return None
