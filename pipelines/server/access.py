"""API keys, and limits on the size and duration of requests."""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from ragspec.pipelines.server.errors import ApiError, error_response
from ragspec.pipelines.server.settings import ServerSettings

log = logging.getLogger("ragspec.server")
BODY_SECONDS = 30.0
bearer = HTTPBearer(auto_error=False)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]


def require_key(settings: ServerSettings) -> list[Any]:
    """Return the dependencies of routes that need a key; none if no keys are set."""
    return [_dependency(settings.keys)] if settings.keys else []


def require_admin_key(settings: ServerSettings) -> list[Any]:
    """Return the dependencies of /admin, which is closed if only other keys are set."""
    if settings.admin_key is not None:
        return [_dependency((settings.admin_key,))]
    return [Depends(_refuse_admin)] if settings.keys else []


def _dependency(keys: Sequence[str]) -> Any:
    def check(request: Request, credentials: Credentials) -> None:
        sent = "" if credentials is None else credentials.credentials.strip()
        # All keys are compared, so that the response time reveals nothing about them.
        matches = [key for key in keys if hmac.compare_digest(sent.encode(), key.encode())]
        if not matches:
            raise ApiError(
                401,
                "Expected 'Authorization: Bearer KEY' with a known key, got none.",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        request.state.key = matches[0]

    return Depends(check)


def _refuse_admin() -> None:
    raise ApiError(403, "Expected an admin key, but none was set when the server started.")


class RequestLimits:
    """ASGI middleware that limits request bodies, counts responses and answers unexpected errors.

    A body must arrive within 30 seconds.

    Args:
        most: Most bytes of a body.
        count: Called with the path and the status of every response.
    """

    def __init__(self, app: ASGIApp, most: int, count: Callable[[str, int], None]) -> None:
        self.app = app
        self.most = most
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        started = False

        async def counted(message: Any) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self.count(scope["path"], message["status"])
            await send(message)

        try:
            await self.app(scope, self._limited(scope, receive), counted)
        except Exception as error:  # handlers answer the expected ones
            log.exception("%s %s failed", scope["method"], scope["path"])
            if started:
                raise
            await error_response(error)(scope, receive, counted)

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        size = int(declared) if declared.isdigit() else 0
        deadline = asyncio.get_running_loop().time() + BODY_SECONDS
        received, whole = 0, False

        async def limited() -> Any:
            nonlocal received, whole
            if whole:
                return await receive()
            if max(size, received) > self.most:
                raise HTTPException(413, f"Expected at most {self.most} bytes, got more")
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                seconds = f"{BODY_SECONDS:g} seconds"
                raise HTTPException(408, f"Expected the whole body within {seconds}") from None
            received += len(message.get("body", b""))
            if received > self.most:
                raise HTTPException(413, f"Expected at most {self.most} bytes, got more")
            whole = not message.get("more_body")
            return message

        return limited
