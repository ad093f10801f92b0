"""The scheduler: requests of all callers of one target, decoded in one batch.

A request joins when there is room and leaves when its text ends. Between two steps of the others, a
chunk of its prompt is read. The tokens of a request do not depend on which others join or leave.
This is continuous batching (Orca, Yu et al., OSDI 2022) with chunked prefills (Sarathi-Serve, arXiv
2403.02310).

One thread at a time takes steps. A call that is alone takes its own: it starts no thread, and
Ctrl-C reaches it. As soon as there are requests of several callers, or of `submit`, a thread of
the scheduler takes the steps of all.
"""

import atexit
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain

import torch

from ragspec.engine.handle import RequestHandle
from ragspec.engine.kv_memory import KvMemory
from ragspec.engine.loop import Loop
from ragspec.engine.sequence import Sequence, attempt, is_interrupt
from ragspec.errors import EngineClosedError, InputError, QueueFullError, pluralize
from ragspec.models.device import as_loaded, release_memory, threads
from ragspec.reports.generation import Generation
from ragspec.sampling.settings import checked_count
from ragspec.verification.base import TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import probe_again
from ragspec.verification.prefix_cache import PrefixCache

CHUNK = 256  # tokens of prompts that are read between two steps of running texts
LONG = 1024  # tokens of a text whose memory is returned to the system, which takes some 50 ms


class Scheduler:
    """Takes the steps of all requests over one target; for its limits see `Engine.with_limits`."""

    def __init__(
        self,
        target: CausalTarget,
        max_batch_size: int,
        max_queue_size: int | None,
        chunk: int,
        memory: KvMemory | None = None,
    ) -> None:
        self.target = target
        self.max_batch_size = checked_count(max_batch_size, "max_batch_size")
        if max_queue_size is not None:
            max_queue_size = checked_count(max_queue_size, "max_queue_size", 0)
        self.max_queue_size = max_queue_size
        self.chunk = checked_count(chunk, "chunk")
        self.memory = memory
        self.prefix_cache = PrefixCache()
        self._driving = threading.RLock()  # held by the thread that takes a step
        self._changed = threading.Condition()  # guards the fields up to `_thread`
        # The queues of each priority and tenant; of equal ones, the first has the next turn.
        self._waiting: dict[tuple[int, str], list[RequestHandle]] = {}
        self._owners: Counter[object | None] = Counter()  # of requests that have not ended
        self._closed = False
        self._thread: threading.Thread | None = None
        self._live: dict[Sequence, RequestHandle] = {}
        self._touched: dict[RequestHandle, None] = {}  # those that have events to deliver
        self._stack = ExitStack()
        self._loop: Loop | None = None
        self._holds = self._longest = 0  # tokens since memory was returned
        self._stepping = 0  # the thread that is in a step, 0 for none

    def __reduce__(self) -> tuple[object, ...]:
        """Copy and pickle the settings alone: threads, requests and caches stay here."""
        limits = self.max_batch_size, self.max_queue_size, self.chunk, self.memory
        return Scheduler, (self.target, *limits)

    @property
    def session(self) -> TargetSession | None:
        """The open session, None while there is nothing to decode."""
        return None if self._loop is None else self._loop.session

    @property
    def waiting(self) -> int:
        """Requests that wait for room in the batch."""
        return sum(map(len, self._waiting.values()))

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return sum(self._owners.values())

    @property
    def live(self) -> int:
        """Requests in the batch."""
        return self.open_requests - self.waiting

    def expect_room(self, requests: int = 1) -> None:
        """Raise QueueFullError if there is no room for them, EngineClosedError if closed."""
        if self._closed:
            raise EngineClosedError("the engine was closed; expected an open one. Make another.")
        room = self.max_queue_size
        if room is not None and self.open_requests + requests > self.max_batch_size + room:
            raise QueueFullError(
                f"The engine has {pluralize(self.open_requests, 'open request')}; expected room "
                f"for {requests} more in a batch of {self.max_batch_size} and a queue of {room}. "
                "Try again later."
            )

    def add(self, handle: RequestHandle) -> None:
        """Add a request; its owner's thread, or that of the scheduler, takes its steps.

        Of one priority, the tenant with the fewest texts in the batch is next; others take turns.
        Errors are those of `expect_room`.
        """
        with self._changed:
            self.expect_room(1 if handle.owner is None else -self.open_requests)
            key = -handle.request.priority, handle.request.tenant
            self._waiting.setdefault(key, []).append(handle)
            self._owners[handle.owner] += 1  # an interrupt may come before, see `_recount`
        self.wake()

    def remove(self, handle: RequestHandle, *, wait: bool = True) -> None:
        """End a request after the current step, and free its memory.

        Args:
            wait: Wait for a step that another thread takes; else that thread may end the request.
        """
        handle.cancel()
        if not self._driving.acquire(blocking=wait):
            return
        try:
            if self._stepping:
                return
            self._sweep()
            self._recount()
            self._close_if_idle()
            handles, self._touched = self._touched, {}
        finally:
            self._driving.release()
        for each in handles:
            each.deliver()

    def wake(self) -> None:
        """Wake the threads that wait; start the scheduler's own if callers need it."""
        with self._changed:
            if self._shared and (self._thread is None or not self._thread.is_alive()):
                reference = weakref.ref(self, partial(_notify, self._changed))
                self._thread = threading.Thread(
                    target=_serve, args=(reference, self._changed), name="ragspec", daemon=True
                )
                self._thread.start()
                _serving.add(self)
            self._changed.notify_all()

    def drive(self, owner: object, until: Callable[[], bool]) -> None:
        """Take steps, or wait while the scheduler's thread takes them, until something holds."""
        inside = threading.get_ident() in (self._stepping, self._thread and self._thread.ident)
        while (inside or owner is not None) and not until():  # else that thread takes them
            if self.step(None if inside or owner is self else owner):
                continue
            self.wake()
            with self._changed:
                if not until() and self._shared:
                    self._changed.wait(0.1)

    def step(self, owner: object | None = None) -> bool:
        """Take one step for all requests and deliver its events; return whether it was taken.

        Args:
            owner: Take no step unless all requests are of this owner.

        Raises:
            InputError: A callback of a step calls the engine in the middle of that step.
        """
        with self._driving:
            if self._stepping:
                raise InputError(
                    "the engine was called in the middle of one of its own steps (by a processor, "
                    "a stopping criterion or on_read); expected no such call. Use another engine."
                )
            if owner is not None and set(self._owners) - {owner}:
                return False
            interrupt: BaseException | None = None
            try:
                self._stepping = threading.get_ident()
                # Later steps write to tensors of this one, perhaps in another mode of the caller:
                # a tensor of the inference mode could not be written outside of it.
                cast = torch.is_autocast_enabled(self.target.device.type)
                as_is = as_loaded(self.target.device) if cast else nullcontext()
                # Threads of torch and of the runtime would wait for each other.
                alone = threads(1) if self.target.runtime == "onnx" else nullcontext()
                with torch.inference_mode(False), torch.no_grad(), as_is, alone:
                    self._turn()
            except BaseException as error:
                interrupt = error if is_interrupt(error) else None
                self._end_all(None if interrupt else error)
            finally:
                self._stepping = 0
                self._recount()
                self._close_if_idle()
            handles, self._touched = self._touched, {}
        for handle in handles:
            handle.deliver()
        if interrupt is not None:
            raise interrupt
        return True

    def partial(self, handle: RequestHandle) -> Generation:
        """Return the generation so far of a request that has not ended."""
        with self._driving:
            return handle.future.result() if handle.done else handle.sequence.generation()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep caches and packed weights ready inside the block, for many short calls in a row.

        The model must not be changed meanwhile.
        """
        with self._driving:
            self._holds += 1
        try:
            yield
        finally:
            with self._driving:
                self._holds -= 1
                self._close_if_idle()

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Take no more requests and the steps of all that are open; see `Engine.close`."""
        with self._changed:
            self._closed = True
        if not cancel:  # a caller that has left, as by an interrupt, takes no steps
            end = time.perf_counter() + (float("inf") if timeout is None else timeout)
            self.drive(self, lambda: not self._owners or time.perf_counter() >= end)
        with self._driving:
            handles = [*chain(*self._waiting.values()), *self._live.values()]
        for handle in handles:
            self.remove(handle)

    @property
    def _shared(self) -> bool:
        """Whether the scheduler's thread takes the steps: nobody else does, or several would."""
        return None in self._owners or len(self._owners) > 1

    # The methods below run in the thread that holds `_driving`.

    def _turn(self) -> None:
        """Let requests leave and join, and take one step in those that have joined."""
        self._sweep()
        self._admit()
        if self._live and self._loop is not None:
            alone, divisible = not self._shared, self.target.divisible
            chunk = (self.target.piece if alone else self.chunk) if divisible else None
            self._loop.step(chunk, read_first=alone)
            for sequence, handle in self._live.items():
                for step in () if sequence.error else sequence.steps[handle.count :]:
                    handle.put(step)
                    self._touched[handle] = None
        for handle in [each for each in self._live.values() if each.sequence.done]:
            self._end(handle)
        self._sweep()  # a callback may have cancelled a request, or called the engine in vain

    def _sweep(self) -> None:
        """End the requests that were cancelled, or whose callbacks failed."""
        with self._changed:
            ended = [each for each in chain(*self._waiting.values()) if each.future.stopped]
            for key, queue in [*self._waiting.items()] if ended else ():
                queue[:] = [each for each in queue if each not in ended]
                if not queue:
                    del self._waiting[key]
        ended += [each for each in self._live.values() if each.future.stopped or each.sequence.done]
        for handle in ended:
            if self._loop is not None and handle.sequence in self._live:
                self._loop.leave(handle.sequence)
            self._end(handle)

    def _admit(self) -> None:
        """Let waiting requests join while there is room; one that cannot has an error then."""
        memory, cache = self.memory, self.prefix_cache
        while len(self._live) < self.max_batch_size and (self._loop is None or self._loop.room):
            texts = Counter(handle.request.tenant for handle in self._live.values())
            with self._changed:
                # The first of these minima, as the tenants take turns.
                key = min(self._waiting, key=lambda each: (each[0], texts[each[1]]), default=None)
                if key is None:
                    break
                first = self._waiting[key][0].sequence
                if memory and not memory.admits(first, self._live, self.session, cache):
                    break
                handle, *others = self._waiting.pop(key)
                if others:
                    self._waiting[key] = others
            handle.joined = time.perf_counter()
            self._live[handle.sequence] = handle
            attempt(handle.sequence, self._join, handle.sequence)

    def _join(self, sequence: Sequence) -> None:
        """Let a sequence begin and join the loop over the open session; open one if needed."""
        if self._loop is None:
            if self.target.probed not in (None, self.target.kinds):
                probe_again(self.target)
            session = self.target.open(prefix_cache=self.prefix_cache, most=self.max_batch_size)
            self._loop = Loop(self._stack.enter_context(session))
        sequence.begin()
        self._loop.join(sequence)

    def _close_if_idle(self) -> None:
        """Close the session if no request uses it, which frees its memory."""
        if not self._live and not self._holds and self._loop is not None:
            self._loop = None
            self._stack.close()
            if self._longest > LONG:
                release_memory()
            self._longest = 0

    def _end_all(self, error: BaseException | None) -> None:
        """End the requests of the batch, or else those that wait, by an error or an interrupt."""
        if self._loop is not None:
            for sequence in self._live:
                with suppress(Exception):  # the session may be broken
                    self._loop.leave(sequence, keep=error is None)
        handles = list(self._live.values())
        if not handles:
            with self._changed:
                handles = [*chain(*self._waiting.values())]
                self._waiting.clear()
        for handle in handles:
            handle.sequence.error = error
            self._end(handle)
        self._loop = None
        with suppress(Exception):
            self._stack.close()

    def _end(self, handle: RequestHandle) -> None:
        """End a request with its generation or the error of its sequence."""
        sequence = handle.sequence
        # The tokenizer may fail, for example: that ends this request alone.
        handle.put(None if sequence.error else attempt(sequence, sequence.generation))
        self._live.pop(sequence, None)
        self._longest = max(self._longest, len(sequence.context.tokens))
        self._touched[handle] = None

    def _recount(self) -> None:
        """Count the requests of each owner and wake those that wait; no interrupt leaves any."""
        with self._changed:
            every = chain(*self._waiting.values(), self._live.values())
            self._owners = Counter(handle.owner for handle in every)
            self._changed.notify_all()


_serving = weakref.WeakSet[Scheduler]()


@atexit.register
def _take_no_more_steps() -> None:
    """Wait for steps of other threads; one that the interpreter ends in a forward aborts it."""
    for scheduler in _serving:
        scheduler._driving.acquire(timeout=10.0)


def _notify(changed: threading.Condition, _: object) -> None:
    with changed:  # a lambda would look this function up, which may be gone at exit
        changed.notify_all()


def _serve(reference: weakref.ref[Scheduler], changed: threading.Condition) -> None:
    """Take the steps of requests of several callers, until the scheduler is dropped."""
    while True:
        with changed:
            changed.wait_for(lambda: (each := reference()) is None or each._shared)
        scheduler = reference()
        if scheduler is None:
            return
        scheduler.step()  # its locals are dropped: a handle here would keep its text
        del scheduler
