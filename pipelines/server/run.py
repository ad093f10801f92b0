"""The server process: load, listen, bound the connections, and stop gracefully."""

import asyncio
import gc
import logging
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from ragspec.pipelines.server.access import log
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings

HEADER_SECONDS = 10.0
BACKLOG = 128  # connections that are accepted at once
MARGIN = 4  # seconds after the drain to send the last answers


def serve(load: Callable[[], Serving], settings: ServerSettings, listening: socket.socket) -> None:
    """Serve until the process is stopped (SIGTERM, Ctrl-C), and let running texts end.

    The server listens while `load` loads models, documents and stores, and raises its errors.
    """
    loading: Future[Serving] = Future()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    log.setLevel(logging.INFO)
    server = Server(build_app(loading, settings), settings)

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

    So clients receive an error for each text that is cut short. A second signal ends running texts
    at once, a third one the process.
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
            timeout_graceful_shutdown=round(min(settings.drain, 1 << 31)) + MARGIN,
        )
        super().__init__(config)
        self._stop = app.state.routes.stop
        self._drain = settings.drain
        self._signals = 0
        logging.getLogger("uvicorn.error").addFilter(self._is_error)

    def _is_error(self, record: logging.LogRecord) -> bool:
        """Return False for the traceback of an interrupt, and for a stream that is not read."""
        interrupted = self._signals > 1 and "Traceback" in record.getMessage()
        return not interrupted and "without completing response" not in record.getMessage()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop, or stop sooner."""
        number = self._signals = self._signals + 1  # another signal may interrupt this one
        self._stop(self._drain if number == 1 else 0.0)
        if number != 2:
            super().handle_exit(sig, frame)


class Connection(H11Protocol):
    """uvicorn's connection, with a deadline for headers and a bound on open connections.

    If too many are open, the server closes the one that has waited longest for its client: to send
    a request or the rest of one, or to read the response. One address may have half of them.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, and close another one if there are too many."""
        super().connection_made(transport)
        self._since = self.loop.time()
        self._deadline = self._since + HEADER_SECONDS
        self._expect_headers()
        most = (self.limit_concurrency or 2) - 1  # at the limit itself uvicorn answers 503
        host = self.client and self.client[0]
        self._make_room(max(1, most // 2), lambda other: other.client and other.client[0] == host)
        self._make_room(most, lambda other: True)

    def data_received(self, data: bytes) -> None:
        """Read a part of a request."""
        super().data_received(data)  # ends the timer
        if self.conn.their_state is h11.IDLE and not self.transport.is_closing():
            self._expect_headers()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._since = self.loop.time()
        self._deadline = self._since + self.timeout_keep_alive + HEADER_SECONDS
        super().on_response_complete()

    @property
    def waits(self) -> bool:
        """Whether the client has to go on, not the server."""
        cycle = self.cycle
        idle = cycle is None or cycle.response_complete or cycle.more_body
        return idle or self.flow.write_paused

    def _expect_headers(self) -> None:
        self._unset_keepalive_if_required()
        handler = self.timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_at(self._deadline, handler)

    def _make_room(self, most: int, counts: "Callable[[Connection], object]") -> None:
        """Close one of the connections that count if they are too many; this one if all work."""
        others = [one for one in self.connections if isinstance(one, Connection) and counts(one)]
        if len(others) > most:
            victim = min((each for each in others if each.waits), key=lambda each: each._since)
            self.connections.discard(victim)
            victim.transport.abort()


def _descriptors() -> int:
    """Return how many files and connections this process may open."""
    try:
        import resource
    except ImportError:  # Windows
        return 1024
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return soft if soft > 0 else 1024
