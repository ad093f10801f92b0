"""The routes of the server, over what it serves."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from ragspec.engine.ticket import Ticket
from ragspec.pipelines.docqa.docqa import NOT_FOUND
from ragspec.pipelines.server.answers import Reply, metrics, usage
from ragspec.pipelines.server.failures import Refusal, refusal_of
from ragspec.pipelines.server.guard import TEXTS, Guard
from ragspec.pipelines.server.pictures import draw
from ragspec.pipelines.server.prompting import Asked, read_chat, read_completion
from ragspec.pipelines.server.relay import events, whole
from ragspec.pipelines.server.schema import (
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    StoreRequest,
    TextRequest,
)
from ragspec.pipelines.server.serving import Serving, tenant_of
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.pipelines.server.sse import DONE, Events, left, line

T = TypeVar("T")
log = logging.getLogger("ragspec.server")


@dataclass(frozen=True, slots=True)
class _Begun:
    """What was asked for, and the tickets of its texts, sample by sample."""

    asked: Sequence[Asked]
    tickets: Sequence[Ticket]


class Application:
    """The routes, over what is served once it is ready.

    load: makes what is served, in a thread, while `/health` says that it is loading. failure: what
    it raised, of which `on_failure` is told.
    """

    def __init__(self, load: Callable[[], Serving], settings: ServerSettings) -> None:
        self._load = load
        self.settings = settings
        self.serving: Serving | None = None
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.stopping = False

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load, serve, and let the texts under way end."""
        threading.Thread(target=self._ready, name="ragspec-load", daemon=True).start()
        yield
        self.stopping = True
        if self.serving is not None:
            await asyncio.to_thread(self.serving.close, self.settings.drain)

    def stop(self) -> None:
        """Take no more texts and let those under way end in time; returns at once."""
        self.stopping = True
        if self.serving is not None:
            pool, seconds = self.serving.pool, self.settings.drain
            threading.Thread(target=lambda: pool.close(timeout=seconds), daemon=True).start()

    def _ready(self) -> None:
        if self.serving is not None:
            return
        try:
            self.serving = self._load()
        except Exception as error:
            self.failure = error
            self.on_failure()

    @property
    def served(self) -> Serving:
        """What is served; raises Refusal before it is ready."""
        if self.serving is None:
            why = "the model is being loaded" if self.failure is None else f"{self.failure}"
            raise Refusal(503, f"{why}; expected a server that /health calls ready.", "not_ready")
        return self.serving

    # The routes.

    async def health(self) -> Response:
        """Tell whether requests are served."""
        if self.serving is None or self.stopping:
            failed = self.failure is not None
            told = "stopping" if self.stopping else "failed" if failed else "loading"
            return JSONResponse({"status": told}, 503)
        pool = self.serving.pool
        return JSONResponse(
            {
                "status": "ready",
                "model": self.serving.name,
                "live": pool.live,
                "waiting": pool.waiting,
            }
        )

    async def models(self) -> Response:
        """List what can be asked."""
        served = self.served
        names = [served.name, *served.images]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, name: str) -> Response:
        """Tell of one model."""
        if name not in (self.served.name, *self.served.images):
            self.served.expect(name)
        return JSONResponse(self._model(name))

    def _model(self, name: str) -> dict[str, Any]:
        served = self.served
        found: dict[str, Any] = {"id": name, "object": "model", "created": served.made}
        if name == served.name:
            found["max_model_len"] = served.engine.target.max_length
            found["stores"] = sorted(served.drafting.stores)
        return {**found, "owned_by": "ragspec"}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Write the next turn of a conversation."""
        served = self._ready_for(body)
        found = await self._begun(
            lambda: [read_chat(body, served.engine, served.documents)], body, request
        )
        reply = Reply("chat", served.name, served.engine.tokenizer)
        if found.asked[0].refused is not None:
            return self._not_found(body, reply, found.asked[0].refused)
        return await self._texts(body, request, found, reply)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        served = self._ready_for(body)
        found = await self._begun(lambda: read_completion(body, served.engine), body, request)
        reply = Reply("completion", served.name, served.engine.tokenizer)
        return await self._texts(body, request, found, reply)

    async def images(self, body: ImageRequest) -> Response:
        """Draw pictures."""
        served = self.served
        return JSONResponse(await asyncio.wrap_future(served.drawing(lambda: draw(body, served))))

    async def stores(self) -> Response:
        """List the stores that are drafted from."""
        served = self.served
        found = await _apart(lambda: [served.store(name) for name in served.drafting.stores])
        return JSONResponse({"object": "list", "data": found})

    async def add_store(self, body: StoreRequest) -> Response:
        """Open a corpus to draft from, while running."""
        served = self.served
        return JSONResponse(await _apart(lambda: served.add_store(body.name, body.path)), 201)

    def admit(self, path: str) -> None:
        """Refuse a text at once where there is no room for one: the cheapest answer of all."""
        if self.serving is not None and path in TEXTS:
            self.serving.pool.expect_room()

    def count(self, path: str, status: int) -> None:
        """Count a request that was answered."""
        if self.serving is not None:
            self.serving.metrics.requests.labels(path, str(status)).inc()

    async def metrics(self) -> Response:
        """Tell what was counted."""
        return Response(self.served.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    # Texts.

    def _ready_for(self, body: TextRequest) -> Serving:
        """Return what is served; raises Refusal for another model, and where all is full."""
        served = self.served
        served.expect(body.model)
        if body.samples <= served.most:
            served.pool.expect_room(body.samples)
        return served

    async def _begun(
        self, read: Callable[[], Sequence[Asked]], body: TextRequest, request: Request
    ) -> _Begun:
        """Read what is asked for and ask the pool for it, in one go beside the event loop."""
        served = self.served
        tenant = tenant_of(request.scope["state"].get("key"), body.user)

        def begin() -> _Begun:
            asked = read()
            refused = any(each.refused is not None for each in asked)
            return _Begun(asked, () if refused else served.submit(asked, tenant))

        return await _apart(begin)

    async def _texts(
        self, body: TextRequest, request: Request, found: _Begun, reply: Reply
    ) -> Response:
        asked, tickets = found.asked, found.tickets
        if body.stream:
            options = body.stream_options
            told = options is not None and options.include_usage
            return Events(self._events(tickets, asked, reply, told), self.settings.stall)
        try:
            done = await _unless_left(request, whole(tickets))
        finally:
            for ticket in tickets:
                ticket.cancel()
        if done is None:
            return Response(status_code=499)  # nobody is there to read it
        _expect_whole(tickets)
        cited = [each.cited for each in asked for _ in range(each.samples)]
        pairs = list(zip(done, cited, strict=True))
        return JSONResponse(await _apart(lambda: reply.whole(pairs, _firsts(asked))))

    async def _events(
        self, tickets: Sequence[Ticket], asked: Sequence[Asked], reply: Reply, told: bool
    ) -> AsyncGenerator[bytes, None]:
        """Yield the events of a stream; texts end with it, however it ends."""
        cited = [each.cited for each in asked for _ in range(each.samples)]
        done = {}
        try:
            if reply.chat:
                for index in range(len(tickets)):
                    yield line(reply.chunk([reply.opening(index)]))
            async for event in events(tickets, reply.tokenizer):
                at, generation = event.index, event.generation
                if generation is None:
                    yield line(reply.chunk([reply.piece(at, event.text, event.scored)]))
                    continue
                _expect_whole([tickets[at]])
                done[at] = generation
                choice = await _apart(lambda: reply.end(at, event.text, generation, cited[at]))  # noqa: B023 - awaited here
                if event.scored:
                    choice["logprobs"] = reply.logprobs(event.scored)
                yield line(reply.chunk([choice]))
            texts = [done[index] for index in range(len(tickets))]
            more = {"usage": usage(texts, _firsts(asked))} if told else {}
            yield line(reply.chunk([], metrics=metrics(texts), **more))
            yield DONE
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status == 500:
                log.exception("a stream failed")
            yield line(refusal.body())
            yield DONE
        finally:
            for ticket in tickets:
                ticket.cancel()

    def _not_found(self, body: ChatRequest, reply: Reply, why: str) -> Response:
        """Answer what the documents do not speak of."""
        found = reply.refused(NOT_FOUND, why)
        if not body.stream:
            return JSONResponse(found)

        async def lines() -> AsyncGenerator[bytes, None]:
            yield line(reply.chunk([reply.opening(0)]))
            delta = {"content": NOT_FOUND, "refusal": why, "annotations": []}
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": "stop"}
            yield line(reply.chunk([choice]))
            options = body.stream_options
            if options is not None and options.include_usage:
                yield line(reply.chunk([], usage=found["usage"]))
            yield DONE

        return Events(lines(), self.settings.stall)


class Server(Guard):
    """The ASGI application: the guard around the routes.

    routes: what answers. fastapi: the application within, which knows the schema.
    """

    def __init__(self, fastapi: FastAPI, settings: ServerSettings, routes: Application) -> None:
        super().__init__(fastapi, settings, routes.count, routes.admit)
        self.fastapi = fastapi
        self.routes = routes


def build_app(serving: Serving | Callable[[], Serving], settings: ServerSettings) -> Server:
    """Return the ASGI application. serving: what is served, or what loads it while it starts."""
    load = (lambda: serving) if isinstance(serving, Serving) else serving
    routes = Application(load, settings)
    routes.serving = serving if isinstance(serving, Serving) else None
    app = FastAPI(title="ragspec", lifespan=routes.lifespan, redirect_slashes=False)
    app.router.route_class = _Route
    app.add_api_route("/health", routes.health, methods=["HEAD"], include_in_schema=False)
    for path, method, route in (
        ("/health", "GET", routes.health),
        ("/metrics", "GET", routes.metrics),
        ("/v1/models", "GET", routes.models),
        ("/v1/models/{name:path}", "GET", routes.model),
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/completions", "POST", routes.complete),
        ("/v1/images/generations", "POST", routes.images),
        ("/admin/stores", "GET", routes.stores),
        ("/admin/stores", "POST", routes.add_store),
    ):
        app.add_api_route(path, route, methods=[method], response_model=None)
    app.add_exception_handler(HTTPException, _unserved)
    return Server(app, settings, routes)


class _Route(APIRoute):
    """Answers every error in OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what serves a request."""
        serve = super().get_route_handler()

        async def served(request: Request) -> Response:
            try:
                return await serve(request)
            except RequestValidationError as error:
                return _answer(_invalid(error))
            except HTTPException:
                raise
            except Exception as error:
                refusal = refusal_of(error)
                if refusal.status == 500:
                    log.exception("%s failed", request.url.path)
                return _answer(refusal)

        return served


def _answer(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


def _invalid(error: RequestValidationError) -> Refusal:
    """Return what is wrong with a request, its first fault by name."""
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return Refusal(400, f"got a body that is no JSON ({first['ctx']['error']}); expected JSON.")
    param = ".".join(where) or None
    if isinstance(first.get("input"), bytes):  # what a browser would send to any site unasked
        return Refusal(400, "got a body of another type; expected Content-Type: application/json.")
    shown = repr(first.get("input"))
    got = shown if len(shown) < 100 else shown[:100] + "..."
    told = f"{param or 'the body'}: {first['msg']}; got {got}."
    return Refusal(400, told, first["type"], param)


async def _unserved(request: Request, error: Exception) -> Response:
    """Answer what no route serves."""
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    refusal.headers = dict(error.headers or {})
    return _answer(refusal)


# Few threads, whatever the machine: each keeps memory of its own for what it once held.
_WORKERS = ThreadPoolExecutor(2, "ragspec-server")


async def _apart(work: Callable[[], T]) -> T:
    """Do what takes a while in a thread, so that streams go on."""
    return await asyncio.get_running_loop().run_in_executor(_WORKERS, work)


async def _unless_left(request: Request, found: Awaitable[T]) -> T | None:
    """Return what comes, None where the caller left before."""
    working = asyncio.ensure_future(found)
    leaving = asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


def _expect_whole(tickets: Sequence[Ticket]) -> None:
    """Raise Refusal where a text was ended by the server."""
    if any(each.future.result().finish_reason == "cancelled" for each in tickets):
        raise Refusal(503, "the server stopped before the text had ended; ask again.", "stopping")


def _firsts(asked: Sequence[Asked]) -> list[int]:
    """Return the number of the first sample of each prompt."""
    found, number = [], 0
    for each in asked:
        found.append(number)
        number += each.samples
    return found
