"""The routes of the server, over what it serves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ragspec.pipelines.server.answers import Reply
from ragspec.pipelines.server.failures import Refusal
from ragspec.pipelines.server.guard import TEXTS, Guard
from ragspec.pipelines.server.pictures import draw
from ragspec.pipelines.server.prompting import EngineRequest, read_chat, read_completion
from ragspec.pipelines.server.routing import routed
from ragspec.pipelines.server.schema import (
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    StoreRequest,
    TextRequest,
)
from ragspec.pipelines.server.serving import Serving, tenant_of
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.pipelines.server.texts import Begun, answer, isolate_errors, no_answer, unless_left


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
            message = "stopping" if self.stopping else "failed" if failed else "loading"
            return JSONResponse({"status": message}, 503)
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
        record: dict[str, Any] = {"id": name, "object": "model", "created": served.created}
        if name == served.name:
            record["max_model_len"] = served.engine.target.max_length
            record["stores"] = sorted(served.drafting.stores)
        return {**record, "owned_by": "ragspec"}

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Write the next turn of a conversation."""
        served = self._ready_for(body)
        result = await self._begun(
            lambda: [read_chat(body, served.engine, served.documents)], body, request
        )
        reply = Reply("chat", served.name, served.engine.tokenizer)
        if result.requests[0].refused is not None:
            return no_answer(body, reply, result.requests[0].refused, self.settings.stall)
        return await answer(body, request, result, reply, self.settings.stall)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        served = self._ready_for(body)
        result = await self._begun(lambda: read_completion(body, served.engine), body, request)
        reply = Reply("completion", served.name, served.engine.tokenizer)
        return await answer(body, request, result, reply, self.settings.stall)

    async def images(self, body: ImageRequest, request: Request) -> Response:
        """Draw pictures, while their caller waits for them."""
        served, gone = self.served, threading.Event()
        image = served.submit_images(lambda: draw(body, served, gone.is_set))
        try:
            result = await unless_left(request, asyncio.wrap_future(image))
        finally:
            gone.set()
        return Response(status_code=499) if result is None else JSONResponse(result)

    async def stores(self) -> Response:
        """List the stores that are drafted from."""
        served = self.served
        result = await isolate_errors(
            lambda: [served.store(name) for name in served.drafting.stores]
        )
        return JSONResponse({"object": "list", "data": result})

    async def add_store(self, body: StoreRequest) -> Response:
        """Open a corpus to draft from, while running."""
        served = self.served
        return JSONResponse(
            await isolate_errors(lambda: served.add_store(body.name, body.path)), 201
        )

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
        self, read: Callable[[], Sequence[EngineRequest]], body: TextRequest, request: Request
    ) -> Begun:
        """Read what is asked for and ask the pool for it, in one go beside the event loop."""
        served = self.served
        tenant = tenant_of(request.scope["state"].get("key"), body.user)

        def begin() -> Begun:
            query = read()
            refused = any(each.refused is not None for each in query)
            return Begun(query, () if refused else served.submit(query, tenant))

        return await isolate_errors(begin)


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
    app = routed(FastAPI(title="ragspec", lifespan=routes.lifespan, redirect_slashes=False))
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
    return Server(app, settings, routes)
