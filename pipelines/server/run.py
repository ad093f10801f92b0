"""The server process: load, listen, and stop gracefully."""

from __future__ import annotations

import gc
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ragspec.pipelines.server.access import log
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.connections import BACKLOG, Connection
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings

MARGIN = 4  # seconds after the drain to send the last answers


def serve(load: Callable[[], Serving], settings: ServerSettings, listening: socket.socket) -> None:
    """Serve until the process is stopped (SIGTERM, Ctrl-C), and let running texts end.

    Args:
        load: Loads the models, documents and stores, while the server listens.
        listening: The socket of `settings.listen()`.

    Raises:
        RagspecError: The errors of loading.
    """
    loading: Future[Serving] = Future()
    app = build_app(loading, settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    server = Server(app, settings)

    def begin() -> None:
        try:
            serving = load()
            # A full collection waits until new objects are a quarter of the old ones. Next to a
            # model's million objects that takes hundreds of requests, whose garbage stays.
            gc.collect()
            gc.freeze()
            loading.set_result(serving)
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
        logging.getLogger("uvicorn.error").addFilter(  # the traceback of an interrupt
            lambda record: self._signals < 2 or "Traceback" not in record.getMessage()
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, or stop sooner."""
        number = self._signals = self._signals + 1  # another signal may interrupt this one
        self._stop(self._drain if number == 1 else 0.0)
        if number != 2:
            super().handle_exit(sig, frame)


def _descriptors() -> int:
    """Return how many files and connections this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else 1024
