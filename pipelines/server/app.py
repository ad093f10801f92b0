"""The routes of the server."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

from ragspec.pipelines.server.access import RequestLimits, require_admin_key, require_key
from ragspec.pipelines.server.answers import OpenAIReply
from ragspec.pipelines.server.errors import ApiError, add_error_handlers
from ragspec.pipelines.server.pictures import draw
from ragspec.pipelines.server.prompting import EngineRequest, read_chat, read_completion
from ragspec.pipelines.server.schema import (
    ChatRequest,
    CompletionRequest,
    ImageRequest,
    StoreRequest,
    TextRequest,
)
from ragspec.pipelines.server.serving import Serving, tenant_of
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.pipelines.server.streams import (
    RunningTexts,
    answer,
    answer_refusal,
    run_in_thread,
    until_disconnected,
)


class Routes:
    """The routes over a `Serving`, which a thread loads.

    Args:
        load: Returns the `Serving`; `/health` reports "loading" until then.

    Attributes:
        failure: The error of `load`.
        on_failure: Called if `load` fails.
    """

    def __init__(self, load: Callable[[], Serving], settings: ServerSettings) -> None:
        self._load = load
        self.settings = settings
        self.serving: Serving | None = None
        self.failure: Exception | None = None
        self.on_failure: Callable[[], None] = lambda: None
        self.stopping = False
        self.paths: set[str] = set()

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Load, serve, and wait at the end until running texts have ended."""
        threading.Thread(target=self._ready, name="ragspec-load", daemon=True).start()
        yield
        self.stopping = True
        if self.serving is not None:
            await asyncio.to_thread(self.serving.close, self.settings.drain)

    def stop(self) -> None:
        """Refuse new texts and let running ones end within the drain time; return at once."""
        self.stopping = True
        if self.serving is not None:
            engine, seconds = self.serving.engine, self.settings.drain
            threading.Thread(target=lambda: engine.close(timeout=seconds), daemon=True).start()

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
        """The model and what goes with it.

        Raises:
            ApiError: It is being loaded, or the load failed.
        """
        if self.serving is None:
            why = "the model is being loaded" if self.failure is None else f"{self.failure}"
            raise ApiError(503, f"{why}; wait until /health says ready.", "not_ready")
        return self.serving

    # The routes.

    async def health(self) -> Response:
        """Return whether requests are served."""
        if self.serving is None or self.stopping:
            failed = self.failure is not None
            status = "stopping" if self.stopping else "failed" if failed else "loading"
            return JSONResponse({"status": status}, 503)
        scheduler = self.serving.scheduler
        return JSONResponse(
            {
                "status": "ready",
                "model": self.serving.name,
                "live": scheduler.live,
                "waiting": scheduler.waiting,
            }
        )

    async def models(self) -> Response:
        """List the models."""
        served = self.served
        names = [served.name, *served.images]
        return JSONResponse({"object": "list", "data": [self._model(name) for name in names]})

    async def model(self, name: str) -> Response:
        """Return one model."""
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
        running = await self._start(
            lambda: [read_chat(body, served.engine, served.documents)], body, request
        )
        reply = OpenAIReply("chat", served.name, served.engine.tokenizer)
        if running.requests[0].refused is not None:
            return answer_refusal(body, reply, running.requests[0].refused, self.settings.stall)
        return await answer(body, request, running, reply, self.settings.stall)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        served = self._ready_for(body)
        running = await self._start(lambda: read_completion(body, served.engine), body, request)
        reply = OpenAIReply("completion", served.name, served.engine.tokenizer)
        return await answer(body, request, running, reply, self.settings.stall)

    async def images(self, body: ImageRequest, request: Request) -> Response:
        """Draw images until they are done or the client disconnects."""
        served, gone = self.served, threading.Event()
        future = served.submit_images(lambda: draw(body, served, gone.is_set))
        try:
            images = await until_disconnected(request, asyncio.wrap_future(future))
        finally:
            gone.set()
        return Response(status_code=499) if images is None else JSONResponse(images)

    async def stores(self) -> Response:
        """List the stores to draft from."""
        served = self.served
        data = await run_in_thread(lambda: [served.store(name) for name in served.drafting.stores])
        return JSONResponse({"object": "list", "data": data})

    async def add_store(self, body: StoreRequest) -> Response:
        """Open one more store to draft from."""
        served = self.served
        return JSONResponse(
            await run_in_thread(lambda: served.add_store(body.name, body.path)), 201
        )

    def count(self, path: str, status: int) -> None:
        """Count a response; paths without a route count as one."""
        if self.serving is not None:
            name = path if path in self.paths else "other"
            self.serving.metrics.requests.labels(name, str(status)).inc()

    async def metrics(self) -> Response:
        """Return the counters in Prometheus' form."""
        return Response(self.served.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    # Texts.

    def _ready_for(self, body: TextRequest) -> Serving:
        """Return the `Serving`; raise for another model's name, and if the queue is full."""
        served = self.served
        served.expect(body.model)
        if body.samples <= served.most:
            served.scheduler.expect_room(body.samples)
        return served

    async def _start(
        self, read: Callable[[], Sequence[EngineRequest]], body: TextRequest, request: Request
    ) -> RunningTexts:
        """Read a request and submit its texts, in a thread."""
        served = self.served
        tenant = tenant_of(getattr(request.state, "key", None), body.user)

        def begin() -> RunningTexts:
            requests = read()
            refused = any(each.refused is not None for each in requests)
            return RunningTexts(requests, () if refused else served.submit(requests, tenant))

        return await run_in_thread(begin)


def build_app(serving: Serving | Callable[[], Serving], settings: ServerSettings) -> FastAPI:
    """Return the application; `app.state.routes` has its routes.

    Args:
        serving: The model and what goes with it, or a function that loads it while the application
            starts.
    """
    load = (lambda: serving) if isinstance(serving, Serving) else serving
    routes = Routes(load, settings)
    routes.serving = serving if isinstance(serving, Serving) else None
    app = FastAPI(title="ragspec", lifespan=routes.lifespan, redirect_slashes=False)
    public, api = APIRouter(), APIRouter(dependencies=require_key(settings))
    admin = APIRouter(dependencies=require_admin_key(settings))
    for router, path, method, route in (
        (public, "/health", "GET", routes.health),
        (api, "/metrics", "GET", routes.metrics),
        (api, "/v1/models", "GET", routes.models),
        (api, "/v1/models/{name:path}", "GET", routes.model),
        (api, "/v1/chat/completions", "POST", routes.chat),
        (api, "/v1/completions", "POST", routes.complete),
        (api, "/v1/images/generations", "POST", routes.images),
        (admin, "/admin/stores", "GET", routes.stores),
        (admin, "/admin/stores", "POST", routes.add_store),
    ):
        router.add_api_route(path, route, methods=[method], response_model=None)
        routes.paths.add(path)
    public.add_api_route("/health", routes.health, methods=["HEAD"], include_in_schema=False)
    for router in (public, api, admin):
        app.include_router(router)
    app.add_middleware(RequestLimits, most=settings.body, count=routes.count)
    add_error_handlers(app)
    app.state.routes = routes
    return app
