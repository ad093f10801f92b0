"""From tickets to an answer: whole, or event by event; texts end with it, however it ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from ragspec.engine.handle import RequestHandle
from ragspec.pipelines.docqa.docqa import NO_ANSWER_TEXT
from ragspec.pipelines.docqa.prompt import Prompt
from ragspec.pipelines.server.answers import Reply, metrics, usage
from ragspec.pipelines.server.failures import Refusal, refusal_of
from ragspec.pipelines.server.prompting import EngineRequest
from ragspec.pipelines.server.relay import events, whole
from ragspec.pipelines.server.schema import TextRequest
from ragspec.pipelines.server.sse import DONE, Events, left, line

T = TypeVar("T")
log = logging.getLogger("ragspec.server")


@dataclass(frozen=True, slots=True)
class Begun:
    """What was asked for, and the tickets of its texts, sample by sample."""

    requests: Sequence[EngineRequest]
    handles: Sequence[RequestHandle]

    def cancel(self) -> None:
        """End the texts."""
        for handle in self.handles:
            handle.cancel()

    @property
    def cited(self) -> list[Prompt | None]:
        """What each text may quote."""
        return [each.cited for each in self.requests for _ in range(each.samples)]

    @property
    def firsts(self) -> list[int]:
        """The number of the first sample of each prompt."""
        result, number = [], 0
        for each in self.requests:
            result.append(number)
            number += each.samples
        return result


async def answer(
    body: TextRequest, request: Request, begun: Begun, reply: Reply, stall: float
) -> Response:
    """Return the answer to a request whose texts have begun; stall: see `Events`."""
    if body.stream:
        return Events(_events(begun, reply, _tells_usage(body)), stall, begun.cancel)
    try:
        done = await unless_left(request, whole(begun.handles))
    finally:
        begun.cancel()
    if done is None:
        return Response(status_code=499)  # nobody is there to read it
    _expect_whole(begun.handles)
    pairs = list(zip(done, begun.cited, strict=True))
    return JSONResponse(await isolate_errors(lambda: reply.whole(pairs, begun.firsts)))


def no_answer(body: TextRequest, reply: Reply, why: str, stall: float) -> Response:
    """Answer what the documents do not speak of: as often as texts were asked for."""
    result = reply.refused(NO_ANSWER_TEXT, why, body.samples)
    if not body.stream:
        return JSONResponse(result)

    async def lines() -> AsyncGenerator[bytes, None]:
        for index in range(body.samples):
            yield line(reply.chunk([reply.opening(index)]))
            delta = {"content": NO_ANSWER_TEXT, "refusal": why, "annotations": []}
            choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": "stop"}
            yield line(reply.chunk([choice]))
        if _tells_usage(body):
            yield line(reply.chunk([], usage=result["usage"]))
        yield DONE

    return Events(lines(), stall)


async def _events(begun: Begun, reply: Reply, message: bool) -> AsyncGenerator[bytes, None]:
    """Yield the events of a stream; told: the usage at its end."""
    cited = begun.cited
    done = {}
    try:
        if reply.chat:
            for index in range(len(begun.handles)):
                yield line(reply.chunk([reply.opening(index)]))
        async for event in events(begun.handles, reply.tokenizer):
            at, generation = event.index, event.generation
            if generation is None:
                yield line(reply.chunk([reply.piece(at, event.text, event.placed)]))
                continue
            _expect_whole([begun.handles[at]])
            done[at] = generation
            choice = await isolate_errors(lambda: reply.end(at, event.text, generation, cited[at]))  # noqa: B023 - awaited here
            if event.placed:
                choice["logprobs"] = reply.logprobs(event.placed)
            yield line(reply.chunk([choice]))
        texts = [done[index] for index in range(len(begun.handles))]
        more = {"usage": usage(texts, begun.firsts)} if message else {}
        yield line(reply.chunk([], metrics=metrics(texts), **more))
        yield DONE
    except Exception as error:
        refusal = refusal_of(error)
        if refusal.status == 500:
            log.exception("a stream failed")
        yield line(refusal.body())
        yield DONE


def _tells_usage(body: TextRequest) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage


def _expect_whole(handles: Sequence[RequestHandle]) -> None:
    """Raise Refusal where a text was ended by the server."""
    if any(each.future.result().finish_reason == "cancelled" for each in handles):
        raise Refusal(503, "the server stopped before the text had ended; ask again.", "stopping")


# Few threads, whatever the machine: each keeps memory of its own for what it once held.
_WORKERS = ThreadPoolExecutor(2, "ragspec-server")


async def isolate_errors(work: Callable[[], T]) -> T:
    """Do what takes a while in a thread, so that streams go on."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work)


async def unless_left(request: Request, result: Awaitable[T]) -> T | None:
    """Return what comes, None where the caller left before."""
    working = asyncio.ensure_future(result)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
