"""The handle of a request: its steps as they come, its result, and its end."""

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Protocol

from ragspec.engine.sequence import Sequence, attempt, is_interrupt
from ragspec.errors import CallbackError, InputError, ResultTimeoutError
from ragspec.reports.generation import Generation
from ragspec.rules.base import Step
from ragspec.sampling.text_output import PlacedToken, TextOutput


class Driver(Protocol):
    """The part of a scheduler that a handle needs."""

    def drive(self, owner: object, until: Callable[[], bool]) -> None:
        """Take steps until something holds; without an owner, only where no other thread does."""

    def remove(self, handle: "RequestHandle", *, wait: bool = True) -> None:
        """End a request after the current step."""

    def partial(self, handle: "RequestHandle") -> Generation:
        """Return the generation so far."""


class RequestFuture(Future[Generation]):
    """The future of a text, which a cancelled await cancels."""

    stopped = False  # whether `cancel` was called

    def cancel(self) -> bool:
        """End the text after the current step; return False, as the text so far is the result."""
        self.stopped = True
        return False


class RequestHandle(Iterator[Step]):
    """An iterator over the steps of a request; `result()` waits for the whole text.

    The tokens of each step are new in the text. All methods may be called from any thread; the
    steps go to one reader. The iteration and `result` raise the error that ended the text, if any.

    Args:
        owner: The call whose thread takes the steps of the request; None for a thread of the
            scheduler.

    Attributes:
        future: The future of the generation, for callbacks and `asyncio.wrap_future`.
        count: Events that were taken: the steps so far, and the end.
        submitted, joined, first, finished: Times of these events, and of the first token, in
            seconds of the performance counter; 0 until they happen.
    """

    def __init__(self, sequence: Sequence, scheduler: Driver, owner: object | None) -> None:
        self.sequence, self.request, self.owner = sequence, sequence.request, owner
        self.submitted = time.perf_counter()
        self.joined = self.first = self.finished = 0.0
        self.future = RequestFuture()
        self.count = 0
        self._scheduler = scheduler
        self._steps: SimpleQueue[Step | None] = SimpleQueue()
        self._events: deque[Step | Generation | None] = deque()
        self._delivering = threading.Lock()
        self._deliverer = 0  # the thread that hands events on
        self._putting = threading.Lock()
        self._complete = False  # whether the reader has the end
        self._watcher: Callable[[], None] | None = None

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` for each step and for the end, so that an event loop never has to wait.

        It is called here for steps that have come, later in the thread that takes the steps.
        """
        with self._putting:
            self._watcher = None if self._complete else watcher
            for _ in range(self._steps.qsize()):
                watcher()

    @property
    def done(self) -> bool:
        """Whether the text has ended, was cancelled or failed."""
        return self.future.done()

    def __next__(self) -> Step:
        self._drive(lambda: not self._steps.empty())
        step = self._steps.get()
        if step is not None:
            return step
        self._steps.put(None)  # for further calls
        if (error := self.future.exception()) is not None:
            raise error
        raise StopIteration

    def cancel(self) -> None:
        """End the text after the current step; the result is the text written so far."""
        self.future.cancel()

    def result(self, timeout: float | None = None) -> Generation:
        """Return the generation once the text has ended; raise the error that ended it, if any.

        Raises:
            ResultTimeoutError: It has not ended within `timeout` seconds.
        """
        self._drive(self.future.done)
        if not wait([self.future], timeout).done:
            raise ResultTimeoutError(f"the text has not ended in {timeout} s; wait, or cancel it.")
        return self.future.result()

    def _drive(self, until: Callable[[], bool]) -> None:
        """Take steps as `Driver.drive` does; raise InputError if they cannot help."""
        if self._deliverer == threading.get_ident() and not until():
            raise InputError("a callback waits for its text; expected it to end. Call partial().")
        self._scheduler.drive(self.owner, until)

    def partial(self) -> Generation:
        """Return the generation so far."""
        return self.future.result() if self.done else self._scheduler.partial(self)

    def stream(self) -> "Stream":
        """Return an iterator over pieces of text, in place of that over the steps."""
        return Stream(self)

    def close(self, *, wait: bool = True) -> None:
        """End the text and free its memory; for `wait` see `Scheduler.remove`."""
        if not self.done:
            self._scheduler.remove(self, wait=wait)

    def put(self, event: Step | Generation | None) -> None:
        """Take a step, the generation, or None for the sequence's error; see `deliver`."""
        self._events.append(event)
        self.count += 1

    def deliver(self) -> None:
        """Hand the events to reader and callbacks, in order; called without locks held.

        An error of a callback ends this text alone. An interrupt (Ctrl-C) is raised.
        """
        while self._events and self._delivering.acquire(blocking=False):
            try:
                self._deliverer = threading.get_ident()
                while self._events:
                    self._hand(self._events.popleft())
            finally:
                self._deliverer = 0
                self._delivering.release()

    def _hand(self, event: Step | Generation | None) -> None:
        if not isinstance(event, Step):
            self._end(event)
            self._put(None)
            return
        self.first = self.first or time.perf_counter()
        self._put(event)
        if self.request.on_step is not None:
            attempt(self.sequence, self.request.on_step, self.request.number, event)

    def _put(self, step: Step | None) -> None:
        """Hand a step, or None at the end, to the reader and the watcher."""
        with self._putting:
            self._steps.put(step)
            if self._watcher is not None:
                attempt(self.sequence, self._watcher)
            if step is None:
                self._complete = True
                self._watcher = None  # it may hold this handle: a cycle that would keep the text

    def _end(self, generation: Generation | None) -> None:
        """Set the generation or an error, and call the callbacks of the future."""
        self.finished = time.perf_counter()
        if (error := self.sequence.error) is None:
            call_or_warn(self.future.set_result, generation)
            return
        stops = isinstance(error, StopIteration | StopAsyncIteration)
        if stops or not isinstance(error, Exception):  # it would end the caller's thread or loop
            cause, error = error, CallbackError(f"{type(error).__name__} ended the text: {error}")
            error.__cause__ = cause
        call_or_warn(self.future.set_exception, error)


def call_or_warn(function: Callable[..., None], *arguments: object) -> None:
    """Call a callback of a text that has ended; its error becomes a RuntimeWarning."""
    try:
        function(*arguments)
    except BaseException as error:
        if is_interrupt(error):
            raise
        warnings.warn(
            f"a callback failed ({type(error).__name__}: {error}); the output is not affected.",
            RuntimeWarning,
            stacklevel=2,
        )


class Stream(Iterator[str]):
    """An iterator over pieces of text, one for each verified step; `result` has the generation.

    `cancel()`, also from another thread, ends the text after the current step, as does an interrupt
    (Ctrl-C) in the iteration or leaving it early. `result` keeps the text written so far. A stop
    string never appears, nor a part of it. If a text pauses, characters that may begin a stop
    string come with the stream that resumes it.

    Attributes:
        ended: Whether the iteration has ended.
        tokens: The tokens that end in the last piece, if log-probabilities are requested and the
            text was not resumed.

    Raises:
        InputError: The engine has no tokenizer.
    """

    def __init__(self, handle: RequestHandle) -> None:
        self.ended = True
        self.tokens: list[PlacedToken] = []
        tokenizer, request = handle.sequence.parts.tokenizer, handle.request
        if tokenizer is None:
            handle.close()
            raise InputError("stream() yields text but the engine has no tokenizer; pass one")
        self._handle = handle
        self._scored = scored = request.logprobs is not None and not request.resume_from
        self._text = TextOutput(tokenizer, request.prompt, request.stop.strings, placed=scored)
        self._placed = 0  # tokens
        self._text.push(request.resume_from)
        self._written = self._text.piece()  # by an earlier call
        self.ended = False

    def __next__(self) -> str:
        while not self.ended:
            if piece := self.read():
                return piece
        raise StopIteration

    def read(self) -> str:
        """Return the text of the next step, "" if it completes no text."""
        try:
            step = next(self._handle, None)
            if step is None:
                self.ended = True
                # Text is no longer held back once nothing can follow it.
                piece = self._text.piece(ends=self.result.finish_reason != "paused")
            else:
                self._text.push(step.tokens)
                # Which tokens of the last step belong to a stop string is only known at the end.
                piece = "" if self._handle.sequence.done else self._text.piece()
        except BaseException:
            self.close()
            raise
        self._written += piece
        self.tokens = []
        if self._scored and (piece or self.ended):
            reason = self.result.finish_reason if self.ended else None
            scored = self._handle.sequence.scored
            self.tokens = self._text.place(scored, self._written, reason, self._placed)
            self._placed += len(self.tokens)
        return piece

    def __del__(self) -> None:
        if not self.ended:
            self._handle.close(wait=False)

    def cancel(self) -> None:
        """End the text after the current step."""
        self._handle.cancel()

    def close(self) -> None:
        """Leave the iteration and free the cache; `result` keeps the text written so far."""
        self.ended = True
        self._handle.close()

    @property
    def result(self) -> Generation:
        """The generation so far; complete once the iteration has ended."""
        return self._handle.partial()
