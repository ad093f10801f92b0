"""Text as it is verified, piece by piece, with a clean way to stop."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self

from ragspec.engine.options import RowSettings
from ragspec.engine.output import Generation
from ragspec.sampling.stopping import TextStream


class Written(Protocol):
    """The one text that a stream is of."""

    @property
    def settings(self) -> RowSettings:
        """What was asked for."""
        ...

    def results(self) -> list[list[Generation]]:
        """Return its generation so far, or once it has ended."""
        ...


class Stream:
    """Iterate over it for pieces of text; `result` has the generation afterwards.

    Each verified step gives one piece. `cancel()`, also from another thread, ends it after the
    current step; an interrupt (Ctrl-C) inside the iteration or leaving it early do the same, and
    what was written is kept in `result`. A stop string never appears, nor a part of it; what may be
    the beginning of one at a pause is given by the stream that goes on.
    """

    def __init__(
        self, run: Written, passes: Iterator[Any], tokenizer: Any, stops: Sequence[str]
    ) -> None:
        self._run = run
        self._passes = passes
        self._text = TextStream(tokenizer)
        self._held = max((len(stop) for stop in stops), default=1) - 1
        self._cancelled = threading.Event()
        self._text.push(run.settings.written)
        self._given = max(0, len(self._text.text) - self._held)  # by the stream before a pause
        self._ended = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        # No generator over `self` here: it would be a cycle, and a stream that is dropped would
        # keep its cache, and the lease on its model, until the garbage collector comes by.
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
        """End the text after the step that is under way."""
        self._cancelled.set()

    def close(self) -> None:
        """Leave the iteration and free the cache; what was written stays in `result`."""
        self._ended = True
        close = getattr(self._passes, "close", None)
        if close is not None:
            close()

    @property
    def result(self) -> Generation:
        """The generation so far; whole once the iteration has ended."""
        return self._run.results()[0][0]

    def _advance(self) -> str | None:
        """Return the next piece that is not empty, or None where there is no more."""
        while not self._ended:
            emissions = next(self._passes, None)
            if emissions is None:
                return None
            if not emissions:
                continue
            for emission in emissions:
                self._text.push(emission.step.tokens)
            row = emissions[-1].row
            # What was held back is due as soon as nothing can follow it.
            self._ended = row.done
            if self._cancelled.is_set():
                self.close()
            piece = self._new(self._ended and row.stop.reason != "paused")
            if piece:
                return piece
        return None

    def _new(self, done: bool) -> str:
        """Return text that cannot become part of a stop string any more."""
        if done:
            text = self._run.results()[0][0].text
        else:
            text = self._text.text
            text = text[: max(0, len(text) - self._held)]
        piece, self._given = text[self._given :], max(self._given, len(text))
        return piece
