"""The server process: load, listen, and stop gracefully."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI

from ragspec.errors import InputError
from ragspec.pipelines.server.access import log
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.connections import BACKLOG, Connection
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.pipelines.answering.docqa import DocQA


MARGIN = 4  # seconds after the drain to send the last answers


@dataclass(frozen=True, slots=True)
class Served:
    """The model to serve, and what goes with it.

    Attributes:
        name: Name of the model in the API.
        documents: Opens the documents that chat requests are answered from.
        stores: Folders of stores by name.
        images: Names or folders of image models.
    """

    name: str
    engine: Callable[[], Engine]
    drafter: str | list[str] | None
    budget: str | int
    documents: Callable[[], DocQA | None]
    stores: Mapping[str, Path] = field(default_factory=dict)
    images: tuple[str, ...] = ()


def serve(served: Served, settings: ServerSettings, on_progress: Callable[[str], None]) -> None:
    """Serve until the process is stopped (SIGTERM, Ctrl-C), and let running texts end.

    Args:
        on_progress: Called with a line about the address.

    Raises:
        InputError: The address is not available; also the errors of loading.
    """
    loading: Future[Serving] = Future()
    app = build_app(loading, settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    listening = _listen(settings)
    host, port = listening.getsockname()[:2]
    on_progress(f"listening on http://{host}:{port}, ready when /health says so")
    server = Server(app, settings)

    def begin() -> None:
        try:
            loading.set_result(_settled(load(served, settings)))
        except Exception as error:
            loading.set_exception(error)
            server.should_exit = True

    threading.Thread(target=begin, name="ragspec-load", daemon=True).start()
    server.run(sockets=[listening])
    if loading.done():
        loading.result()


class Server(uvicorn.Server):
    """uvicorn's server with our connections, which begins to drain at the signal itself.

    So clients hear of texts that were cut short. A second signal ends running texts at once, a
    third one the process.
    """

    def __init__(self, app: FastAPI, settings: ServerSettings) -> None:
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            http=Connection,
            ws="none",
            backlog=BACKLOG,
            limit_concurrency=min(settings.max_connections, _descriptors() // 2) + 1,
            timeout_keep_alive=settings.keep_alive,  # type: ignore[arg-type]
            log_config=None,
            log_level=logging.ERROR,  # its warnings are of requests, which anyone can send
            access_log=False,
            timeout_graceful_shutdown=round(settings.drain) + MARGIN,
        )
        super().__init__(config)
        self._stop = app.state.routes.stop
        self._drain = settings.drain
        self._signals = 0

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Begin to stop, or stop sooner."""
        self._signals += 1
        self._stop(self._drain if self._signals == 1 else 0.0)
        if self._signals != 2:
            super().handle_exit(sig, frame)


def _descriptors() -> int:
    """Return how many files and connections this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else 1024


def load(served: Served, settings: ServerSettings) -> Serving:
    """Load the models, documents and stores."""
    serving = Serving(
        served.engine(),
        served.name,
        default=(served.drafter, served.budget),
        documents=served.documents(),
        images={Path(name).name: _pipeline(name) for name in served.images},
        max_batch_size=settings.max_batch_size,
        max_queue_size=settings.max_queue_size,
    )
    try:
        for name, path in served.stores.items():
            serving.add_store(name, str(path))
    except BaseException:
        serving.close(0.0)
        raise
    return serving


def _settled(serving: Serving) -> Serving:
    """Exclude all loaded objects from garbage collection.

    A full collection waits until new objects are a quarter of the old ones. Next to a model's
    million objects that takes hundreds of requests, whose garbage stays in memory until then.
    """
    gc.collect()
    gc.freeze()
    return serving


def _pipeline(name: str) -> object:
    from ragspec.visual import ImagePipeline

    return ImagePipeline.from_pretrained(name)


def _listen(settings: ServerSettings) -> socket.socket:
    """Return a listening socket; raise InputError if the address is not available."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        address = settings.host, settings.port
        return socket.create_server(address, family=family, backlog=2048)
    except OSError as error:
        raise InputError(
            f"cannot listen on {settings.host}:{settings.port} ({error.strerror or error}); "
            "expected a free address of this machine. Choose another with --port."
        ) from error
