"""Connections: a deadline for the headers of requests, and a bound on how many are open."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
BACKLOG = 128  # connections that are accepted at once


class Connection(H11Protocol):
    """uvicorn's connection, with a deadline for headers and a bound on open connections.

    If too many are open, the server closes the one that has waited longest for its client: to send
    a request or the rest of one, or to read the response. One address may have half of them.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a client in, and close the connection of another one if there are too many."""
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

    def _make_room(self, most: int, counts: Callable[[Connection], object]) -> None:
        """Close one of the connections that count if they are too many; this one if all work."""
        others = [
            each for each in self.connections if isinstance(each, Connection) and counts(each)
        ]
        if len(others) > most:
            victim = min((each for each in others if each.waits), key=lambda each: each._since)
            self.connections.discard(victim)
            victim.transport.abort()
