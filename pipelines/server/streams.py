"""Responses to running requests: whole, or as server-sent events.

Every response cancels its texts when it ends.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from sse_starlette import EventSourceResponse
from sse_starlette.sse import AppStatus, SendTimeoutError
from starlette.types import Receive, Scope, Send

from ragspec.engine.handle import RequestHandle
from ragspec.pipelines.openai import OpenAIReply, citations_of, figures, finish_reason
from ragspec.pipelines.server.access import log
from ragspec.pipelines.server.errors import ApiError, as_api_error
from ragspec.pipelines.server.prompting import EngineRequest
from ragspec.pipelines.server.schema import TextRequest
from ragspec.reports.generation import Generation, place_tokens
from ragspec.sampling.text_output import PlacedToken

T = TypeVar("T")
Piece = tuple[int, str, list[PlacedToken] | None, Generation | None]
STALL = 10.0  # seconds after which a stream that is not read ends
# Few threads, as each retains the memory of its largest task.
_WORKERS = ThreadPoolExecutor(2, "ragspec-server")
# When the server stops, the engine ends running texts after `drain` seconds, and so the streams.
AppStatus.enable_automatic_graceful_drain = False


class EventStream(EventSourceResponse):
    """Server-sent events that end if the client disconnects or does not read.

    `release` is called at the end, even if no event was sent.
    """

    def __init__(
        self, content: AsyncGenerator[bytes], release: Callable[[], None], stall: float = STALL
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


@dataclass(frozen=True, slots=True)
class RunningTexts:
    """The running texts of one API request: the request and the handle of each sample.

    Requests that are answered without the model have no handles.
    """

    requests: Sequence[EngineRequest]
    handles: list[RequestHandle]

    def cancel(self) -> None:
        """Cancel the texts."""
        for handle in self.handles:
            handle.cancel()

    async def finished(self) -> list[Generation]:
        """Return the texts, once all have ended."""
        futures = [asyncio.wrap_future(handle.future) for handle in self.handles]
        texts = [_expect_whole(each) for each in await asyncio.gather(*futures)]
        return texts or [each.unasked.generation for each in self.requests if each.unasked]

    def message(self, index: int, generation: Generation) -> dict[str, object]:
        """Return the citations of a text, and its support or why it is a refusal."""
        request = self.requests[index]
        answer = request.unasked or (request.answer and request.answer(generation))
        if answer is None:
            return {}
        name = "support" if answer.refused is None else "refused"
        return {"annotations": citations_of(answer), name: getattr(answer, name)}

    def opening(self, index: int) -> dict[str, list[dict[str, object]]]:
        """Return the documents' sentences that answer a question, known before the text."""
        sentences = self.requests[index].search.sentences
        return {"sentences": [each.to_dict() for each in sentences]} if sentences else {}


async def answer(
    body: TextRequest, request: Request, running: RunningTexts, reply: OpenAIReply
) -> Response:
    """Return the response to a request whose texts are running."""
    if body.stream:
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return EventStream(_encode(running, reply, usage), running.cancel)
    try:
        texts = await until_disconnected(request, running.finished())
    finally:
        running.cancel()
    return JSONResponse(await run_in_thread(_whole, running, reply, texts))


def _whole(running: RunningTexts, reply: OpenAIReply, texts: list[Generation]) -> dict[str, object]:
    """Return a whole answer."""
    choices = []
    for index, each in enumerate(texts):
        text, request = each, running.requests[index]
        if request.echo or request.echoed:
            scored = None if each.logprobs is None else [*request.echoed, *each.logprobs]
            text = replace(each, text=request.echo + each.text, prompt_tokens=[], logprobs=scored)
        placed = None if text.logprobs is None else place_tokens(reply.tokenizer, text)
        message: dict[str, Any] = {**running.opening(index), **running.message(index, each)}
        finish = finish_reason(each)
        choices.append(reply.choice(index, text.text, placed=placed, finish=finish, **message))
    return reply.record(choices, chunk=False, **figures(texts))


async def _encode(running: RunningTexts, reply: OpenAIReply, usage: bool) -> AsyncGenerator[bytes]:
    """Yield the encoded events of a stream; an error becomes the last one."""
    done: dict[int, Generation] = {}

    def chunk(*choices: dict[str, object], **more: object) -> bytes:
        return _event(reply.record(choices, chunk=True, **more))

    try:
        if reply.chat:
            for index in range(len(running.requests)):
                opening: dict[str, Any] = {"role": "assistant", **running.opening(index)}
                yield chunk(reply.choice(index, "", stream=True, **opening))
        async for index, text, placed, generation in read_texts(running):
            if text or placed:
                yield chunk(reply.choice(index, text, stream=True, placed=placed))
            if generation is not None:
                done[index] = generation
                message: dict[str, Any] = await run_in_thread(running.message, index, generation)
                finish = finish_reason(generation)
                yield chunk(reply.choice(index, "", stream=True, finish=finish, **message))
        if usage:
            yield chunk(**figures([done[index] for index in sorted(done)]))
    except Exception as error:
        failure = as_api_error(error)
        if failure.status_code == 500:
            log.exception("a stream failed")
        yield _event(failure.body())
    yield b"data: [DONE]\n\n"


def _event(record: Mapping[str, object]) -> bytes:
    return b"data: " + json.dumps(record).encode() + b"\n\n"


def _expect_whole(generation: Generation) -> Generation:
    """Return a generation; raise ApiError if the server cut its text short."""
    if generation.finish_reason == "cancelled":
        raise ApiError(503, "the server stopped before the text ended; ask again.", "stopping")
    return generation


async def run_in_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run slow work in a thread, so that streams continue."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work, *arguments)


async def until_disconnected(request: Request, work: Awaitable[T]) -> T:
    """Return the result of the work; raise ApiError if the client disconnects first."""

    async def disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(disconnected())
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ApiError(499, "the client has disconnected.")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def read_texts(running: RunningTexts) -> AsyncIterator[Piece]:
    """Yield the texts piece by piece as they come, until all have ended; raise their errors.

    A piece has the number of its text, its characters, the tokens that end in them if
    log-probabilities are requested, and the whole generation if it is the last one.
    """
    if not running.handles:
        for index, each in enumerate(await running.finished()):
            yield index, each.text, None, each
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[int] = asyncio.Queue()
    streams = [handle.stream() for handle in running.handles]

    def notify(index: int) -> None:  # called in the engine's thread
        try:
            loop.call_soon_threadsafe(ready.put_nowait, index)
        except RuntimeError:  # the loop was closed
            streams[index].cancel()

    for index, handle in enumerate(running.handles):
        handle.watch(partial(notify, index))
    while not all(stream.ended for stream in streams):
        index = await ready.get()
        stream, scored = streams[index], running.requests[index].options.get("logprobs")
        text = stream.read()
        generation = _expect_whole(stream.result) if stream.ended else None
        yield index, text, None if scored is None else stream.tokens, generation
