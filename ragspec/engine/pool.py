"""A pool: requests of many callers, decoded in one batch on one device.

    with Pool(engine, max_batch_size=8) as pool:
        handle = pool.submit("Name three rivers.", Sampling(temperature=0.8, seed=7))
        for emission in handle:
            print(emission.step.tokens)
        print(handle.result().text)

Each request joins when a slot is free and leaves when its text ends. Between two steps of the
others, a chunk of its prompt is read. The tokens of a request are those that `engine.generate`
returns for it alone, whichever requests join or leave. This is continuous batching (Orca, Yu et
al., OSDI 2022) with chunked prefills (Sarathi-Serve, arXiv 2403.02310).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self, Unpack

from ragspec.budget.cost_curve import SharedForward
from ragspec.engine.engine import Engine
from ragspec.engine.handle import RequestHandle
from ragspec.engine.loop import Loop
from ragspec.engine.options import Options, RowSettings
from ragspec.engine.rows import Parts, Row, Run
from ragspec.engine.step import Emission
from ragspec.errors import InputError, PoolClosedError, QueueFullError
from ragspec.rules.base import Step
from ragspec.sampling.settings import Sampling

CHUNK = 256  # tokens of prompts that are read between two steps
NOT_HERE = ("prefix_cache", "prefix", "on_read")  # refused options: a pool has its own cache


@dataclass(slots=True, eq=False)
class _Request:
    """A submitted request, and its row once it has joined."""

    handle: RequestHandle
    engine: Engine
    settings: RowSettings
    sample: int
    tenant: str
    on_step: Callable[[Step], None] | None
    run: Run | None = None

    @property
    def row(self) -> Row:
        """The row of a request that has joined."""
        assert self.run is not None
        return self.run.rows[0]


class Pool:
    """Decodes requests of many callers in one batch; one thread owns the device.

    A context manager: leaving it waits for all texts, and after an error cancels them.

    Args:
        engine: Its model, drafter, rule and budget serve requests without their own.
        max_batch_size: Texts decoded in one batch.
        chunk: Tokens of prompts that are read between two steps of running texts.
        max_queue_size: Requests that may wait, None for any number.

    Raises:
        InputError: A number is out of range.
    """

    def __init__(
        self,
        engine: Engine,
        max_batch_size: int = 8,
        *,
        chunk: int = CHUNK,
        max_queue_size: int | None = None,
    ) -> None:
        for name, value, least in (
            ("max_batch_size", max_batch_size, 1),
            ("chunk", chunk, 1),
            ("max_queue_size", max_queue_size, 0),
        ):
            if value is not None and value < least:
                raise InputError(f"{name} is {value}; expected a whole number, at least {least}.")
        self.engine = engine
        self.max_batch_size = max_batch_size
        self.max_queue_size = max_queue_size
        self._forward = SharedForward()
        self._chunk = chunk if engine.target.divisible else None
        self._changed = threading.Condition()
        self._waiting: deque[_Request] = deque()
        self._live: dict[Row, _Request] = {}
        self._open_requests = 0  # submitted and not ended
        self._closed = False
        self._opened = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._serve, name="ragspec-pool", daemon=True)
        self._thread.start()
        self._opened.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def waiting(self) -> int:
        """Requests that wait for a slot."""
        return len(self._waiting)

    @property
    def live(self) -> int:
        """Requests that have a slot."""
        return self._open_requests - len(self._waiting)

    def expect_room(self, requests: int = 1) -> None:
        """Raise QueueFullError if there is no room for the requests, PoolClosedError if closed."""
        if self._closed:
            raise PoolClosedError("the pool was closed; expected an open one. Make another.")
        if (
            self.max_queue_size is None
            or self._open_requests + requests <= self.max_batch_size + self.max_queue_size
        ):
            return
        raise QueueFullError(
            f"{len(self._waiting)} requests wait; expected room for {requests} more of "
            f"{self.max_queue_size} at most. Try again later."
        )

    def submit(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        sample: int = 0,
        tenant: str = "",
        engine: Engine | None = None,
        on_step: Callable[[Step], None] | None = None,
        **options: Unpack[Options],
    ) -> RequestHandle:
        """Queue a request and return its handle at once.

        Args:
            prompt, sampling, **options: As for `Engine.generate`; one prompt and n=1.
            sample: Which of the n samples of a prompt this is, from 0; each is its own request.
            tenant: Owner of the text; cached tokens are never shared between tenants.
            engine: Another engine over the same target, whose drafter, rule and budget serve this
                request.
            on_step: Called with every step, in the pool's thread; an error ends this text alone.

        Raises:
            InputError, SamplingError, PromptTooLongError: An argument is invalid.
            QueueFullError: Too many requests wait.
            PoolClosedError: The pool was closed.
        """
        engine = self._expect(engine, options)
        encoded, settings = engine.prepare(prompt, sampling, options)
        if not encoded.single or settings.sampling.n > 1:
            raise InputError(
                f"submit() got {len(encoded.ids)} prompts with n={settings.sampling.n}; expected "
                "one prompt and n=1. Submit each text by itself, and samples with sample=0, 1, ..."
            )
        if sample < 0:
            raise InputError(f"sample is {sample}; expected 0 or more.")
        handle = RequestHandle(encoded.ids[0], settings, engine.tokenizer, self._wake)
        request = _Request(handle, engine, settings, sample, tenant, on_step)
        with self._changed:
            self.expect_room()
            self._open_requests += 1
            self._waiting.append(request)
            self._changed.notify_all()
        return handle

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Take no more requests and wait until all texts have ended.

        Args:
            cancel: Cancel running texts after the current step.
            timeout: Seconds after which the remaining texts are cancelled, None for no limit.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if not cancel:
            self._thread.join(timeout)
        with self._changed:
            left = [*self._waiting, *self._live.values()]
        for request in left:
            request.handle.cancel()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close(cancel=raised[0] is not None)

    def _expect(self, engine: Engine | None, options: Options) -> Engine:
        """Return the engine of a request; raise InputError if the pool cannot serve it."""
        refused = [name for name in NOT_HERE if options.get(name)]
        if refused:
            raise InputError(
                f"got {refused[0]}= for a pool; expected none, as a pool keeps what was read and "
                "reads in chunks. Leave it out."
            )
        if engine is not None and engine.target is not self.engine.target:
            raise InputError(
                "got an engine over another target; expected one over the pool's own. Make it "
                "with Engine(pool.engine.target, tokenizer, drafter=...)."
            )
        return engine or self.engine

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    # All methods below run in the pool's own thread.

    def _serve(self) -> None:
        """Own the device until the pool is closed and all texts have ended."""
        failed = False
        while not failed or self._wait():  # after an error, open a session for a new request alone
            try:
                with self.engine.target.open_rows(self.max_batch_size) as session:
                    self._opened.set()
                    loop = Loop(session, self._forward, chunk=self._chunk, difference=True)
                    while self._wait():
                        self._turn(loop)
                return
            except Exception as error:
                if not self._opened.is_set():
                    self._failure = error
                    self._opened.set()
                    return
                # The state of the session is unknown: its requests fail, later ones get another.
                failed = True
                with self._changed:
                    left = list(self._live.values())
                    if not left:
                        left = list(self._waiting)
                        self._waiting.clear()
                for each in left:
                    self._end(each, error)

    def _wait(self) -> bool:
        """Wait for a request; return False if the pool is closed and has none left."""
        with self._changed:
            while not self._live and not self._waiting:
                if self._closed:
                    return False
                self._changed.wait()
            return True

    def _turn(self, loop: Loop) -> None:
        """Let requests leave and join, and take one step in those that have joined."""
        for each in [each for each in self._live.values() if each.handle.cancelled]:
            loop.leave(each.row)
            self._end(each)
        while loop.room and (request := self._next()) is not None:
            self._join(loop, request)
        if not self._live:
            return
        for emission in loop.step():
            self._hand(loop, emission)
        for each in [each for each in self._live.values() if each.row.done]:
            self._end(each, each.row.error)

    def _next(self) -> _Request | None:
        """End cancelled requests, and return the next one that may join, or None."""
        with self._changed:
            cancelled = [request for request in self._waiting if request.handle.cancelled]
            for request in cancelled:
                self._waiting.remove(request)
            free = len(self._live) < self.max_batch_size
            joining = self._waiting.popleft() if self._waiting and free else None
        for request in cancelled:
            request.run = self._run(replace(request.engine.parts, drafter=None), request)
            self._end(request)
        return joining

    def _run(self, parts: Parts, request: _Request) -> Run:
        prompts, samples = [request.handle.prompt], [request.sample]
        return Run(parts, prompts, request.settings, 0, samples, self._forward)

    def _join(self, loop: Loop, request: _Request) -> None:
        """Make a request's row and let it join; an error ends this request alone."""
        request.handle.joined = time.perf_counter()
        try:
            request.run = self._run(request.engine.parts, request)
            self._live[request.row] = request
            loop.join([request.row], request.engine.rule, request.tenant)
        except Exception as error:
            self._end(request, error)
            return
        if request.row not in loop.rows:  # a resumed text that has ended already
            self._end(request)

    def _hand(self, loop: Loop, emission: Emission) -> None:
        """Hand an emission to its request's callback and handle."""
        request = self._live[emission.row]
        try:
            if request.on_step is not None:
                request.on_step(emission.step)
        except Exception as error:
            emission.row.error = error
            loop.leave(emission.row)
        request.handle.emit(emission)

    def _end(self, request: _Request, error: Exception | None = None) -> None:
        """End a request with its generation or an error, and free its slot."""
        with self._changed:
            self._open_requests -= 1
            if request.run is not None:
                self._live.pop(request.row, None)
        if error is not None:
            request.handle.end(error)
            return
        assert request.run is not None
        try:
            request.run.close(time.perf_counter() - request.run.began)
            generation = request.run.results()[0][0]
        except Exception as failed:  # for example of the tokenizer: it ends this request alone
            request.handle.end(failed)
            return
        request.handle.end(generation)
        request.engine.notify(generation)
