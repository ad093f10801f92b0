"""The handle of a request in a pool."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Self

from ragspec.engine.options import RowSettings
from ragspec.engine.output import Generation, Stream
from ragspec.engine.step import Emission
from ragspec.errors import InputError


class RequestHandle:
    """An iterator over the emissions of a request; `result()` waits for the whole text.

    An emission's `step.tokens` are new tokens of the text. All methods may be called from any
    thread; the emissions go to one reader. The iteration and `result` raise the error that ended
    the text, if any.

    Attributes:
        future: The future of the generation, for callbacks.
        submitted, joined, first, finished: Times of these events, and of the first token, in
            seconds of the performance counter; 0 until they happen.
    """

    def __init__(
        self, prompt: list[int], settings: RowSettings, tokenizer: Any, wake: Callable[[], None]
    ) -> None:
        self.prompt = prompt
        self.settings = settings
        self._tokenizer = tokenizer
        self.submitted = time.perf_counter()
        self.joined = self.first = self.finished = 0.0
        self.future: Future[Generation] = Future()
        self.future.set_running_or_notify_cancel()  # `cancel` here is the one way to end it
        self._wake = wake
        self._emissions: SimpleQueue[Emission | None] = SimpleQueue()
        self._cancelled = False
        self._putting = threading.Lock()
        self._watcher: Callable[[], None] | None = None
        self._summary = False  # whether the text has ended

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` in the pool's thread for each emission and for the end.

        It is called at once, in this thread, for emissions that have come already. So an event loop
        never has to wait for one. The handle drops it at the end.
        """
        with self._putting:
            self._watcher = None if self._summary else watcher
            for _ in range(self._emissions.qsize()):
                watcher()

    @property
    def done(self) -> bool:
        """Whether the text has ended, was cancelled or failed."""
        return self.future.done()

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` was called."""
        return self._cancelled

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Emission:
        emission = self._emissions.get()
        if emission is not None:
            return emission
        self._emissions.put(None)  # for further calls
        if not self._cancelled and (error := self.future.exception()) is not None:
            raise error
        raise StopIteration

    def cancel(self) -> None:
        """End the text after the current step; the result is the text written so far."""
        self._cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> Generation:
        """Wait for the end of the text and return its generation.

        Args:
            timeout: Seconds, None for no limit.

        Raises:
            TimeoutError: The text has not ended in time.
            Exception: The error that ended the text.
        """
        return self.future.result(timeout)

    def stream(self) -> Stream:
        """Return an iterator over pieces of text, to use instead of iterating over the handle.

        Leaving it early cancels the text; see `Stream`.

        Raises:
            InputError: The engine has no tokenizer.
        """
        if self._tokenizer is None:
            raise InputError("stream() yields text but the engine has no tokenizer; pass one")
        return Stream(self, _passes(self), self._tokenizer, self.settings.stop.strings)

    def results(self) -> list[list[Generation]]:
        """Return the generation of `result` in the form that `Stream` needs."""
        return [[self.result()]]

    def emit(self, emission: Emission) -> None:
        """Hand an emission to the reader; called by the pool alone."""
        self.first = self.first or time.perf_counter()
        self._put(emission)

    def end(self, outcome: Generation | Exception) -> None:
        """Set the generation or the error that ended the text; called by the pool alone."""
        self.finished = time.perf_counter()
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
        self._put(None)

    def _put(self, emission: Emission | None) -> None:
        with self._putting:
            self._emissions.put(emission)
            if self._watcher is not None:
                self._watcher()
            if emission is None:
                self._summary = True
                self._watcher = None  # it may hold this handle: a cycle that would keep the text


def _passes(handle: RequestHandle) -> Iterator[list[Emission]]:
    """Yield the emissions of a handle one by one; once its text has ended, all that are left."""
    try:
        for emission in handle:
            yield [emission, *(handle if emission.row.done else ())]
    finally:
        if not handle.done:
            handle.cancel()
