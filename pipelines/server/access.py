"""API keys, and limits on the size and duration of requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragspec.pipelines.server.errors import ApiError, error_response

log = logging.getLogger("ragspec.server")
BODY_BYTES, BODY_SECONDS = 2_000_000, 30.0
bearer = HTTPBearer(auto_error=False)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


def require_key(keys: Sequence[str]) -> Any:
    """Return the dependency of routes that need one of these keys; without any they are closed."""

    async def check(request: Request, credentials: Credentials) -> None:
        if not keys:
            raise ApiError(403, "Expected an admin key, but none was set when the server started.")
        sent = "" if credentials is None else credentials.credentials.strip()
        # All keys are compared, so that the response time reveals nothing about them.
        matches = [key for key in keys if hmac.compare_digest(sent.encode(), key.encode())]
        if not matches:
            message = "Expected 'Authorization: Bearer KEY' with a known key, got none."
            headers = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, message, "invalid_api_key", headers=headers)
        request.state.key = matches[0]

    return Depends(check)


class RequestLimits:
    """ASGI middleware that limits request bodies, counts responses and answers unexpected errors.

    Args:
        count: Called with the path of the route and the status of every response.
    """

    def __init__(self, app: ASGIApp, count: Callable[[str, int], None]) -> None:
        self.app = app
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started = False

        async def counted(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.count(getattr(scope.get("route"), "path", "other"), message["status"])
            await send(message)

        try:
            messages = [await _read_body(Headers(scope=scope), receive)]

            async def replayed() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replayed, counted)
        except Exception as error:  # handlers answer the expected ones
            if not isinstance(error, ApiError):
                log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await error_response(error)(scope, receive, counted)


async def _read_body(headers: Headers, receive: Receive) -> Message:
    """Return the message with the whole body, or the one that the client has disconnected."""
    body, declared = b"", headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while max(size, len(body)) <= BODY_BYTES:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body") and len(body) <= BODY_BYTES:
                    return {**message, "body": body}
    except TimeoutError:
        seconds = f"{BODY_SECONDS:g} seconds"
        raise ApiError(408, f"Expected the whole body within {seconds}.", "timeout") from None
    raise ApiError(413, f"Expected at most {BODY_BYTES} bytes, got more.", "too_large")
