"""A text on its way through a pool: what its owner holds."""

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
    """Iterate over it for emissions as they are verified; `result()` waits for the whole text.

    An emission's `step.tokens` are new tokens of the text. All methods may be called from any
    thread; the emissions go to one reader. What ended the text by an error is raised by the
    iteration and by `result`. future: of the result, for those who would rather be called.
    submitted, joined, first, finished: seconds of the performance counter; 0 for what has not
    happened.
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
        self._summary = False  # that it has ended

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher`, in the pool's thread, whenever an emission or the end has come.

        As often as there is something to read, so that an event loop never has to wait for it; at
        once, in this thread, for what has come already. It is let go at the end.
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
        """Whether somebody asked for its end."""
        return self._cancelled

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Emission:
        result = self._emissions.get()
        if result is not None:
            return result
        self._emissions.put(None)  # for whoever asks again
        if not self._cancelled and (error := self.future.exception()) is not None:
            raise error
        raise StopIteration

    def cancel(self) -> None:
        """End the text after the step that is running; its result is what was written."""
        self._cancelled = True
        self._wake()

    def result(self, timeout: float | None = None) -> Generation:
        """Return the whole text; waits for its end.

        timeout: seconds, None for no limit. Raises TimeoutError, and what ended the text.
        """
        return self.future.result(timeout)

    def stream(self) -> Stream:
        """Return an iterator over pieces of text, in place of that over emissions; see `Stream`.

        Leaving it early cancels the text. Raises InputError where the engine has no tokenizer.
        """
        if self._tokenizer is None:
            raise InputError("stream() yields text but the engine has no tokenizer; pass one")
        return Stream(self, _passes(self), self._tokenizer, self.settings.stop.strings)

    def results(self) -> list[list[Generation]]:
        """Return what `result` does, as a stream asks for it."""
        return [[self.result()]]

    def emit(self, emission: Emission) -> None:
        """Hand an emission on; for the pool alone."""
        self.first = self.first or time.perf_counter()
        self._put(emission)

    def end(self, outcome: Generation | Exception) -> None:
        """Say what became of the text; for the pool alone."""
        self.finished = time.perf_counter()
        if isinstance(outcome, Exception):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)
        self._put(None)

    def _put(self, result: Emission | None) -> None:
        with self._putting:
            self._emissions.put(result)
            if self._watcher is not None:
                self._watcher()
            if result is None:
                self._summary = True
                self._watcher = None  # it may hold this handle: a cycle that would keep the text


def _passes(handle: RequestHandle) -> Iterator[list[Emission]]:
    """Yield the emissions of a handle, all that are left once its text has ended."""
    try:
        for emission in handle:
            yield [emission, *(handle if emission.row.done else ())]
    finally:
        if not handle.done:
            handle.cancel()
