"""Responses to running requests: whole, or as server-sent events.

Every response cancels its texts when it ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
from bisect import bisect_left
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from ragspec.pipelines.answering.answer import NO_ANSWER_TEXT
from ragspec.pipelines.server.answers import OpenAIReply, Placed, metrics, place_tokens, usage
from ragspec.pipelines.server.errors import ApiError, as_api_error
from ragspec.sampling.text_output import TextOutput

if TYPE_CHECKING:
    from ragspec.engine.handle import RequestHandle
    from ragspec.pipelines.answering.prompt import Prompt
    from ragspec.pipelines.server.prompting import EngineRequest
    from ragspec.pipelines.server.schema import TextRequest
    from ragspec.reports.generation import Generation
    from ragspec.sampling.settings import TokenLogprob

T = TypeVar("T")
log = logging.getLogger("ragspec.server")
DONE = b"data: [DONE]\n\n"
# When the server stops, the engine ends running texts after `drain` seconds, and so the streams.
AppStatus.enable_automatic_graceful_drain = False


class EventStream(EventSourceResponse):
    """Server-sent events that end if the client disconnects or does not read.

    Args:
        content: Encoded events.
        stall: Most seconds to send one event.
        release: Called at the end, even if no event was sent.
    """

    def __init__(
        self,
        content: AsyncGenerator[bytes, None],
        stall: float,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(content, send_timeout=stall)
        self._content = content
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while the client reads them."""
        try:
            await super().__call__(scope, receive, send)
        except SendTimeoutError:
            log.info("a stream was not read for %g seconds", self.send_timeout)
        finally:
            self._release()
            await self._content.aclose()
            del self._release, self._content, self.body_iterator  # frees the texts at once


def encode_event(record: Any) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(record).encode() + b"\n\n"


@dataclass(frozen=True, slots=True)
class RunningTexts:
    """The running texts of one API request, with a handle for each sample."""

    requests: Sequence[EngineRequest]
    handles: Sequence[RequestHandle]

    def cancel(self) -> None:
        """Cancel the texts."""
        for handle in self.handles:
            handle.cancel()

    @property
    def cited(self) -> list[Prompt | None]:
        """The prompt that each text may cite from."""
        return [each.cited for each in self.requests for _ in range(each.samples)]

    @property
    def firsts(self) -> list[int]:
        """The number of the first sample of each prompt."""
        return list(accumulate((each.samples for each in self.requests[:-1]), initial=0))


async def answer(
    body: TextRequest, request: Request, running: RunningTexts, reply: OpenAIReply, stall: float
) -> Response:
    """Return the response to a request whose texts are running; for `stall` see `EventStream`."""
    if body.stream:
        return EventStream(_encode(running, reply, _wants_usage(body)), stall, running.cancel)
    try:
        futures = (asyncio.wrap_future(handle.future) for handle in running.handles)
        done = await until_disconnected(request, asyncio.gather(*futures))
    finally:
        running.cancel()
    if done is None:
        return Response(status_code=499)  # the caller has left
    _expect_finished(running.handles)
    pairs = list(zip(done, running.cited, strict=True))
    return JSONResponse(await run_in_thread(lambda: reply.whole(pairs, running.firsts)))


def answer_refusal(body: TextRequest, reply: OpenAIReply, why: str, stall: float) -> Response:
    """Return the response to a question that no document covers, once for each sample."""
    record = reply.refused(NO_ANSWER_TEXT, why, body.samples)
    if not body.stream:
        return JSONResponse(record)

    async def encode() -> AsyncGenerator[bytes, None]:
        for index in range(body.samples):
            yield encode_event(reply.chunk([reply.opening(index)]))
            delta = {"content": NO_ANSWER_TEXT, "refusal": why, "annotations": []}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": "stop"}
            yield encode_event(reply.chunk([choice]))
        if _wants_usage(body):
            yield encode_event(reply.chunk([], usage=record["usage"]))
        yield DONE

    return EventStream(encode(), stall)


async def _encode(
    running: RunningTexts, reply: OpenAIReply, wants_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events of a stream; an error becomes the last one."""
    handles, cited = running.handles, running.cited
    done = {}
    try:
        if reply.chat:
            for index in range(len(handles)):
                yield encode_event(reply.chunk([reply.opening(index)]))
        async for event in read_events(handles, reply.tokenizer):
            at, generation = event.index, event.generation
            if generation is None:
                yield encode_event(reply.chunk([reply.piece(at, event.text, event.placed)]))
                continue
            _expect_finished([handles[at]])
            done[at] = generation
            choice = await run_in_thread(lambda: reply.end(at, event.text, generation, cited[at]))  # noqa: B023 - awaited here
            if event.placed:
                choice["logprobs"] = reply.logprobs(event.placed)
            yield encode_event(reply.chunk([choice]))
        texts = [done[index] for index in range(len(handles))]
        more = {"usage": usage(texts, running.firsts)} if wants_usage else {}
        yield encode_event(reply.chunk([], metrics=metrics(texts), **more))
    except Exception as error:
        failure = as_api_error(error)
        if failure.status == 500:
            log.exception("a stream failed")
        yield encode_event(failure.body())
    yield DONE


def _wants_usage(body: TextRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _expect_finished(handles: Sequence[RequestHandle]) -> None:
    """Raise ApiError if the server cut a text short."""
    if any(handle.future.result().finish_reason == "cancelled" for handle in handles):
        raise ApiError(503, "the server stopped before the text ended; ask again.", "stopping")


# Few threads, since each keeps the memory of its largest task.
_WORKERS = ThreadPoolExecutor(2, "ragspec-server")


async def run_in_thread(work: Callable[[], T]) -> T:
    """Run slow work in a thread, so that streams continue."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work)


async def until_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """Return the result of the work, None if the client disconnects first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of text number `index`, or its end.

    Attributes:
        placed: Log-probabilities of the piece's tokens, if requested.
        generation: The whole text, once it has ended.
    """

    index: int
    text: str
    placed: Sequence[Placed] | None = None
    generation: Generation | None = None


async def read_events(handles: Sequence[RequestHandle], tokenizer: Any) -> AsyncIterator[TextEvent]:
    """Yield the events of all texts as they come, until all have ended; raise their errors."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[int] = asyncio.Queue()

    def notify(index: int) -> None:  # called in the engine's thread
        try:
            loop.call_soon_threadsafe(ready.put_nowait, index)
        except RuntimeError:  # the loop was closed
            handles[index].cancel()

    for index, handle in enumerate(handles):
        handle.watch(lambda index=index: notify(index))  # type: ignore[misc]
    readers = [EventReader(index, handle, tokenizer) for index, handle in enumerate(handles)]
    running = len(readers)
    while running:
        event = readers[await ready.get()].read()
        if event is not None:
            yield event
            running -= event.generation is not None


class EventReader:
    """Converts the steps of one text to events."""

    def __init__(self, index: int, handle: RequestHandle, tokenizer: Any) -> None:
        request = handle.request
        self.index = index
        self.handle = handle
        self.tokenizer = tokenizer
        self.scored = request.logprobs is not None
        self.output = TextOutput(
            tokenizer, request.prompt, request.stop.strings, placed=self.scored
        )
        self.sent = 0  # characters
        self.placed = 0  # tokens whose log-probabilities were sent

    def read(self) -> TextEvent | None:
        """Return the next event, None if the step completes no text."""
        emission = next(self.handle, None)
        if emission is None:
            generation = self.handle.result()
            rest, placed = self.output.piece(ends=True), None
            if self.scored:
                placed = place_tokens(generation, self.tokenizer)[self.placed :]
            return TextEvent(self.index, rest, placed, generation)
        self.output.push(emission.step.tokens)
        # Which tokens of the last step belong to a stop string is only known at the end.
        text = "" if emission.sequence.done else self.output.piece()
        if not text:
            return None
        self.sent += len(text)
        return TextEvent(self.index, text, self._place(emission.sequence.scored))

    def _place(self, scored: Sequence[TokenLogprob]) -> list[Placed] | None:
        """Return the log-probabilities of the tokens that begin in the text sent so far."""
        if not self.scored:
            return None
        first, starts = self.placed, self.output.starts
        self.placed = bisect_left(starts, self.sent, first)
        new = slice(first, self.placed)
        return [Placed(*pair) for pair in zip(scored[new], starts[new], strict=True)]
