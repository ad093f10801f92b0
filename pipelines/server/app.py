"""The routes of the server, and its images."""

import asyncio
import base64
import io
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ragspec.errors import EngineClosedError, InputError
from ragspec.pipelines.openai import OpenAIReply
from ragspec.pipelines.server import schema
from ragspec.pipelines.server.access import RequestLimits, require_key
from ragspec.pipelines.server.errors import HANDLERS, ApiError, naming_field
from ragspec.pipelines.server.prompting import read_chat, read_completion
from ragspec.pipelines.server.serving import Serving, tenant_of
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.pipelines.server.streams import answer, run_in_thread, until_disconnected

T = TypeVar("T")


class Routes:
    """The routes over a `Serving`; `/health` reports "loading" until its future is set."""

    def __init__(self, loading: Future[Serving], settings: ServerSettings) -> None:
        self.loading = loading
        self.settings = settings
        self.stopping = False

    @asynccontextmanager
    async def lifespan(self, app: FastAPI) -> AsyncIterator[None]:
        """Serve, and wait at the end until running texts have ended."""
        yield
        self.stopping = True
        if self.serving is not None:
            await asyncio.to_thread(self.serving.close, self.settings.drain)

    def stop(self, seconds: float) -> None:
        """Refuse new work and let running work end within some seconds; return at once."""
        self.stopping = True
        if self.serving is not None:
            threading.Thread(target=self.serving.close, args=(seconds,), daemon=True).start()

    @property
    def serving(self) -> Serving | None:
        """The served engine with its data, None if it is not loaded."""
        loaded = self.loading.done() and self.loading.exception() is None
        return self.loading.result() if loaded else None

    @property
    def served(self) -> Serving:
        """The served engine with its data; raise ApiError if it is not loaded."""
        failure = self.loading.exception() if self.loading.done() else "the model is being loaded"
        if failure is not None:
            raise ApiError(503, f"{failure}; wait until /health says ready.", "not_ready")
        return self.loading.result()

    async def health(self) -> Response:
        """Return whether requests are served."""
        if self.serving is None or self.stopping:
            status = "failed" if self.loading.done() else "loading"
            return JSONResponse({"status": "stopping" if self.stopping else status}, 503)
        scheduler = self.serving.scheduler
        counts = {"live": scheduler.live, "waiting": scheduler.waiting}
        return JSONResponse({"status": "ready", "model": self.serving.name, **counts})

    async def models(self) -> Response:
        """List the models."""
        data = [await self.model(name) for name in (self.served.name, *self.served.images)]
        return JSONResponse({"object": "list", "data": data})

    async def model(self, name: str) -> dict[str, object]:
        """Return one model."""
        served = self.served
        record: dict[str, object] = {"id": name, "object": "model", "created": served.created}
        if name not in served.images:
            served.expect(name)
            record["max_model_len"] = served.engine.target.max_length
            record["stores"] = sorted(served.stores)
        return {**record, "owned_by": "ragspec"}

    async def chat(self, body: schema.ChatRequest, request: Request) -> Response:
        """Write the next turn of a conversation."""
        return await self._answer(body, request)

    async def complete(self, body: schema.CompletionRequest, request: Request) -> Response:
        """Continue prompts."""
        return await self._answer(body, request)

    async def images(self, body: schema.ImageRequest, request: Request) -> Response:
        """Draw images until they are done or the client disconnects."""
        headers = schema.ignored_fields(body)
        with naming_field(body):
            images = await self._alone(request, partial(draw, body, self.served))
        return JSONResponse(images, 200, headers)

    async def stores(self) -> Response:
        """List the stores to draft from."""
        data = [await run_in_thread(self.served.store, name) for name in self.served.stores]
        return JSONResponse({"object": "list", "data": data})

    async def add_store(self, body: schema.StoreRequest) -> Response:
        """Open one more store to draft from."""
        with naming_field(body):
            store = await run_in_thread(self.served.add_store, body.name, body.path)
        return JSONResponse(store, 201)

    def count(self, path: str, status: int) -> None:
        """Count a response."""
        if self.serving is not None:
            self.serving.metrics.requests.labels(path, str(status)).inc()

    async def metrics(self) -> Response:
        """Return the counters in Prometheus' form."""
        page = generate_latest(self.served.metrics.registry)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def _alone(self, request: Request, work: Callable[[Callable[[], bool]], T]) -> T:
        """Return the result of long work; its argument says whether the client has disconnected."""
        served, left = self.served, threading.Event()

        def gone() -> bool:
            if served.stopped.is_set():
                raise EngineClosedError("the server is stopping")
            return left.is_set()

        future = served.submit_alone(lambda: work(gone))
        try:
            return await until_disconnected(request, asyncio.wrap_future(future))
        except asyncio.CancelledError:
            if self.stopping or served.stopped.is_set():
                raise EngineClosedError("the server is stopping") from None
            raise
        finally:
            left.set()

    async def _answer(
        self, body: schema.ChatRequest | schema.CompletionRequest, request: Request
    ) -> Response:
        """Read a request, submit its texts, and return the response to it."""
        served, tenant = self.served, tenant_of(getattr(request.state, "key", None), body.user)
        engine = served.engine
        prompts = 1 if isinstance(body, schema.ChatRequest) else len(body.prompts)
        with naming_field(body):
            served.expect(body.model, prompts, body.n or 1)
            headers = schema.ignored_fields(body)
            if isinstance(body, schema.ChatRequest):
                requests = await run_in_thread(read_chat, body, served.documents)
            elif body.echo:  # one more forward, to score the prompt
                requests = await self._alone(request, partial(read_completion, body, engine))
            else:
                requests = await run_in_thread(read_completion, body, engine)
            running = await run_in_thread(served.submit, body, requests, tenant)
            reply = OpenAIReply(isinstance(body, schema.ChatRequest), served.name, engine.tokenizer)
            response = await answer(body, request, running, reply)
        response.headers.update(headers)
        return response


def build_app(serving: Serving | Future[Serving], settings: ServerSettings) -> FastAPI:
    """Return the application over a `Serving` or its future; `app.state.routes` has its routes."""
    loading: Future[Serving] = Future() if isinstance(serving, Serving) else serving
    if isinstance(serving, Serving):
        loading.set_result(serving)
    routes = Routes(loading, settings)
    app = FastAPI(
        title="ragspec",
        lifespan=routes.lifespan,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
        exception_handlers=HANDLERS,
    )
    api = [require_key(settings.keys)] if settings.keys else []
    admin_keys = () if settings.admin_key is None else (settings.admin_key,)
    admin = [require_key(admin_keys, "the admin key")] if settings.keys or admin_keys else []
    for path, method, route, dependencies in (
        ("/health", "GET", routes.health, []),
        ("/metrics", "GET", routes.metrics, admin),
        ("/v1/models", "GET", routes.models, api),
        ("/v1/models/{name:path}", "GET", routes.model, api),
        ("/v1/chat/completions", "POST", routes.chat, api),
        ("/v1/completions", "POST", routes.complete, api),
        ("/v1/images/generations", "POST", routes.images, api),
        ("/admin/stores", "GET", routes.stores, admin),
        ("/admin/stores", "POST", routes.add_store, admin),
    ):
        app.add_api_route(path, route, methods=[method], dependencies=dependencies)
    app.add_api_route("/health", routes.health, methods=["HEAD"], include_in_schema=False)
    app.add_middleware(RequestLimits, settings=settings, count=routes.count)
    if settings.cors:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["X-Request-Id", "X-Ignored-Fields", "Retry-After"],
        )
    app.state.routes = routes
    return app


def draw(body: schema.ImageRequest, served: Serving, gone: Callable[[], bool]) -> dict[str, object]:
    """Draw images and return them in OpenAI's form, as PNG; raise ApiError for another model.

    The prompt of a model of classes is a class. `gone` says whether the client has disconnected.
    """
    images = served.images
    if not images:
        raise ApiError(404, "no image model is served here; expected one (--images NAME).")
    name = next(iter(images)) if body.model is None else body.model
    if name not in images:
        message = f"got the model {name!r}; expected one of {', '.join(images)}."
        raise ApiError(404, message, "model_not_found", "model")
    sampling = {"guidance_scale", "temperature", "top_p", "top_k", "min_p"}
    options = body.model_dump(include={"seed", "negative_prompt", *sampling}, exclude_none=True)
    family = images[name].family
    if body.size not in (None, "auto"):
        options["width"], options["height"] = map(int, str(body.size).split("x"))
        try:
            family.sized(options["height"], options["width"])
        except InputError as error:
            pixels = int(family.codec.reduction)
            fits = "x".join(str(side * pixels) for side in reversed(family.raster.shape))
            fits += f", or multiples of {pixels * family.step} pixels" if family.step else ""
            message = f"got size={body.size!r}; expected auto or {fits}."
            raise ApiError(400, message, param="size") from error
    if family.condition is not None:
        options[family.condition] = body.prompt
    options |= {"num_images_per_prompt": body.n or 1, "callback_on_step_end": lambda *_: gone()}
    out, data = images[name](**options), []
    for image in out.images:
        image.save(file := io.BytesIO(), "PNG")
        data.append({"b64_json": base64.b64encode(file.getvalue()).decode()})
    stats = out.stats
    tokens = sum(report.tokens for report in stats.reports) or stats.excess.size
    record = {"num_forwards": stats.forwards, "num_tokens": tokens, "label": out.label}
    metrics = {"speculative_decoding": {**record, "seeds": list(stats.seeds)}}
    return {"created": int(time.time()), "data": data, "metrics": metrics}
