"""Server-sent events: one line of JSON each, given up where nobody reads them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"


def line(result: Any) -> bytes:
    """Return one event."""
    return b"data: " + json.dumps(result).encode() + b"\n\n"


class Events(StreamingResponse):
    """A stream of events that ends where its caller leaves or reads nothing for `stall` seconds.

    release: called once it has ended, however it does: also where no event was ever asked for, so
    that the generator never began and would let nothing go.
    """

    def __init__(
        self,
        result: AsyncGenerator[bytes, None],
        stall: float,
        release: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(
            result,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._matches = result
        self._stall = stall
        self._release = release

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while they are read."""

        async def hurried(message: Any) -> None:
            async with asyncio.timeout(self._stall):
                await send(message)

        sending = asyncio.ensure_future(self.stream_response(hurried))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
            if sending.done() and not sending.cancelled():
                error = sending.exception()
                if error is not None and not isinstance(error, TimeoutError | OSError):
                    raise error
        finally:
            self._release()
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            await self._matches.aclose()


async def left(receive: Receive) -> None:
    """Return once the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
