"""A server from what the command line gives: load, listen, and stop in good order."""

from __future__ import annotations

import gc
import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from ragspec.errors import InputError
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.drafting import TenantDrafting
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.docqa.docqa import DocQA


MARGIN = 4  # seconds beyond the drain in which answers are sent


@dataclass(frozen=True, slots=True)
class Served:
    """What to serve. documents: folders and files, or an index. images: names or folders."""

    name: str
    engine: Callable[[], Engine]
    drafter: str | list[str] | None
    budget: str | int
    documents: Callable[[], DocQA | None]
    stores: Mapping[str, Path] = field(default_factory=dict)
    images: tuple[str, ...] = ()


def serve(served: Served, settings: ServerSettings, on_progress: Callable[[str], None]) -> None:
    """Listen until the process is told to stop (SIGTERM, Ctrl-C), and let texts come to their end.

    on_progress: where it listens, for people. Raises InputError where the address cannot be had,
    and what loading raises, once it has.
    """
    app = build_app(lambda: _settled(load(served, settings)), settings)
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        log_level=logging.WARNING,
        access_log=False,
        timeout_graceful_shutdown=round(settings.drain) + MARGIN,
    )
    listening = _listen(settings)
    host, port = listening.getsockname()[:2]
    on_progress(f"listening on http://{host}:{port}, ready when /health says so")
    server = _Server(config, app.state.routes.stop)
    app.state.routes.on_failure = lambda: setattr(server, "should_exit", True)
    server.run(sockets=[listening])
    if app.state.routes.failure is not None:
        raise app.state.routes.failure


class _Server(uvicorn.Server):
    """Begins to drain at the signal itself: callers hear of texts that the end cut short."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to stop."""
        self._stop()
        super().handle_exit(sig, frame)


def load(served: Served, settings: ServerSettings) -> Serving:
    """Load the models, documents and stores."""
    engine = served.engine()
    source = _draft_model(engine)
    drafting = TenantDrafting(engine, served.drafter, served.budget, source)
    result = Serving(
        engine,
        served.name,
        drafting=drafting,
        documents=served.documents(),
        images={Path(name).name: _pipeline(name) for name in served.images},
        max_batch_size=settings.max_batch_size,
        max_queue_size=settings.max_queue_size,
    )
    try:
        for name, path in served.stores.items():
            result.add_store(name, str(path))
    except BaseException:
        result.close(0.0)
        raise
    return result


def _settled(serving: Serving) -> Serving:
    """Keep what was loaded out of the garbage collector's rounds.

    A full round waits until a quarter as much is new as there is old: beside a model's million
    objects that is after hundreds of requests, whose garbage stays that long.
    """
    gc.collect()
    gc.freeze()
    return serving


def _draft_model(engine: Engine) -> object:
    """Return the drafter of the draft model, None where there is none."""
    from ragspec.drafters.combined import within
    from ragspec.drafters.model.drafter import ModelDrafter

    if engine.drafter is None:
        return None
    return next((each for each in within(engine.drafter) if isinstance(each, ModelDrafter)), None)


def _pipeline(name: str) -> object:
    from ragspec.visual import ImagePipeline

    return ImagePipeline.from_pretrained(name)


def _listen(settings: ServerSettings) -> socket.socket:
    """Return a socket that is bound; raises InputError."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    result = socket.socket(family, socket.SOCK_STREAM)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        result.bind((settings.host, settings.port))
        result.listen(2048)
    except OSError as error:
        result.close()
        raise InputError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}); "
            "expected a free address of this machine. Choose another with --port."
        ) from error
    return result
