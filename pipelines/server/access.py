"""API keys, host names, limits of bodies, request ids and the log of requests."""

import asyncio
import hmac
import logging
import re
import time
import uuid
import zlib
from collections.abc import Callable, Sequence
from typing import Annotated
from urllib.parse import quote

from fastapi import Depends, Request, params
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ragspec.errors import InputError
from ragspec.pipelines.server.errors import ApiError, error_response
from ragspec.pipelines.server.settings import ServerSettings, read_keys

log = logging.getLogger("ragspec.server")
BODY_BYTES, BODY_SECONDS = 2_000_000, 30.0
REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


def require_key(entries: Sequence[str], expected: str = "a known key") -> params.Depends:
    """Return the dependency of routes on one of these keys, see `read_keys`; none closes them."""

    async def check(request: Request, credentials: Credentials) -> None:
        if not entries:
            raise ApiError(403, "Expected an admin key, but none was set when the server started.")
        try:
            keys = read_keys(entries)
        except InputError as error:
            log.error("the keys cannot be read: %s", error)
            raise ApiError(503, "the keys cannot be read; see the server's log.") from error
        sent = "" if credentials is None else credentials.credentials.strip()
        # All keys are compared, so that the response time reveals nothing about them.
        matches = [key for key in keys if hmac.compare_digest(sent.encode(), key.encode())]
        if not matches:
            got = "another one" if sent else "none"
            message = f"Expected 'Authorization: Bearer KEY' with {expected}, got {got}."
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        request.state.key = matches[0]

    return params.Depends(check)


class RequestLimits:
    """ASGI middleware that checks hosts, reads bodies, names and logs requests, and counts answers.

    Unexpected errors are answered too. `count` takes the route and the status of every response.
    """

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, count: Callable[[str, int], None]
    ) -> None:
        self.app = app
        self.settings = settings
        self.log = log.info if settings.access_log else log.debug
        self.count = count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, began, status = Headers(scope=scope), time.perf_counter(), 0
        scope["path"] = re.sub("(?i)^https?://[^/]*", "", scope["path"]) or "/"  # proxies send URLs
        name = headers.get("x-request-id", "")
        name = name if REQUEST_ID.fullmatch(name) else uuid.uuid4().hex
        what = f"{scope['method']} {quote(scope['path'])}"

        async def counted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = name
                self.count(getattr(scope.get("route"), "path", "other"), status)
            await send(message)

        try:
            self._check_host(headers)
            messages = [await _read_body(headers, receive)]
            if messages[0]["type"] == "http.disconnect":
                return

            async def replayed() -> Message:
                return messages.pop() if messages else await receive()

            await self.app(scope, replayed, counted)
        except Exception as error:  # handlers answer the expected ones
            if not isinstance(error, ApiError):
                log.exception("%s failed (request %s)", what, name)
            if status:
                raise
            response = await error_response(None, error)
            await response(scope, receive, counted)
        finally:
            # Bodies that never came are counted alone: a thousand of them should fill no log.
            if status not in (0, 408) and scope["path"] != "/health":
                milliseconds = 1000 * (time.perf_counter() - began)
                self.log("%s %d %.0f ms (request %s)", what, status, milliseconds, name)

    def _check_host(self, headers: Headers) -> None:
        """Raise ApiError if a request was sent to a name that the server does not go by."""
        host = headers.get("host")  # None from no browser
        if host is not None and not self.settings.accepts(host):
            raise ApiError(
                403,
                f"Expected the name of this machine as host, got {host!r}. Accept more names with "
                "--set hosts=NAME,NAME, or start the server with --key.",
                "unknown_host",
            )


async def _read_body(headers: Headers, receive: Receive) -> Message:
    """Return the message with the whole body, or the one that the client has disconnected."""
    encoding = headers.get("content-encoding", "").strip().lower().removeprefix("x-")
    if encoding not in ("", "identity", "gzip"):
        expected = "Expected a plain body or Content-Encoding: gzip"
        raise ApiError(415, f"{expected}, got {encoding!r}.", "unsupported_encoding")
    declared = headers.get("content-length", "")
    size = int(declared) if declared.isdecimal() else 0
    message: Message = {"more_body": True}
    body = b""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            while message.get("more_body") and max(size, len(body)) <= BODY_BYTES:
                message = await receive()
                body += message.get("body", b"")
    except TimeoutError:
        seconds = f"{BODY_SECONDS:g} seconds"
        raise ApiError(408, f"Expected the whole body within {seconds}.", "timeout") from None
    if encoding == "gzip" and 0 < len(body) <= BODY_BYTES:
        body = _plain(body)
    if max(size, len(body)) > BODY_BYTES:
        raise ApiError(413, f"Expected at most {BODY_BYTES} bytes, got more.", "too_large")
    return {**message, "body": body}


def _plain(body: bytes) -> bytes:
    """Return a gzip body as it was, cut if it is too large; raise ApiError if it is damaged."""
    unpacked = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS)
    try:
        plain = unpacked.decompress(body, BODY_BYTES + 1)
    except zlib.error as error:
        raise ApiError(400, f"Expected a body in gzip, got other bytes ({error}).") from error
    if len(plain) <= BODY_BYTES and (not unpacked.eof or unpacked.unused_data):
        raise ApiError(400, "Expected one whole gzip stream as the body, got a part or more.")
    return plain
