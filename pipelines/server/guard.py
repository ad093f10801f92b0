"""What stands before every route: sizes, keys, and errors in OpenAI's form."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ragspec.pipelines.server.failures import Refusal, refusal_of
from ragspec.pipelines.server.settings import ServerSettings

Scope = MutableMapping[str, Any]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

log = logging.getLogger("ragspec.server")
PATIENCE = 30.0  # seconds that a body may take to come
OPEN = ("/health",)
ADMIN = "/admin/"
TEXTS = ("/v1/chat/completions", "/v1/completions")
ROUTES = frozenset(
    {
        *("/health", "/metrics", "/v1/models", "/admin/stores"),
        *TEXTS,
        "/v1/images/generations",
    }
)


class Guard:
    """An ASGI application around another.

    It asks for a key, caps the body, and answers what the other one did not expect. The key that
    was given is `scope["state"]["key"]`. count: told of every answer's path and status. admit: told
    of a path before the body is read; raises what a request for it is refused by.
    """

    def __init__(
        self,
        app: App,
        settings: ServerSettings,
        count: Callable[[str, int], None],
        admit: Callable[[str], None],
    ) -> None:
        self.app = app
        self.settings = settings
        self._count = count
        self._admit = admit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began = False

        async def noted(message: MutableMapping[str, Any]) -> None:
            nonlocal began
            if message["type"] == "http.response.start":
                began = True
                self._count(_named(scope["path"]), message["status"])
            await send(message)

        try:
            scope.setdefault("state", {})["key"] = self._key(scope)
            self._admit(scope["path"])
            body = await self._body(scope, receive)
            await self.app(scope, _again(body, receive), noted)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status >= 500:
                log.exception("%s %s failed", scope["method"], scope["path"])
            if began:
                raise  # half an answer: the connection ends
            await _answer(refusal, noted)

    def _key(self, scope: Scope) -> str | None:
        """Return the key that a request brings, None where none is asked for."""
        settings, path = self.settings, scope["path"]
        if path in OPEN:
            return None
        inputs = dict(scope["headers"]).get(b"authorization", b"").decode("latin-1")
        kind, _, key = inputs.partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        if path.startswith(ADMIN) and settings.admin_key is not None:
            return _expect(key, (settings.admin_key,))
        if path.startswith(ADMIN) and settings.keys:
            raise Refusal(403, "no admin key was set when the server began; expected one.")
        return _expect(key, settings.keys) if settings.keys else None

    async def _body(self, scope: Scope, receive: Receive) -> bytes:
        """Read the body; raises Refusal for one that is too large, or never comes whole."""
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._whole(scope, receive)
        except TimeoutError:
            raise Refusal(408, f"got no whole body in {PATIENCE} seconds.", "timeout") from None

    async def _whole(self, scope: Scope, receive: Receive) -> bytes:
        most = self.settings.body
        record = dict(scope["headers"]).get(b"content-length", b"0")
        if record.isdigit() and int(record) > most:
            raise Refusal(413, f"got {int(record)} bytes; expected {most} at most.", "too_large")
        result = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refusal(400, "the caller left before its request was whole.")
            result += message.get("body", b"")
            if len(result) > most:
                raise Refusal(413, f"got more than {most} bytes.", "too_large")
            if not message.get("more_body"):
                return bytes(result)


def _named(path: str) -> str:
    """Return a path as it is counted; what nobody serves is one."""
    return path if path in ROUTES else "other"


def _expect(key: str, known: tuple[str, ...]) -> str:
    """Return a key that is known, found in a time that tells nothing of the others."""
    matches = [each for each in known if hmac.compare_digest(key.encode(), each.encode())]
    if not matches:
        raise Refusal(
            401,
            "got no key, or one that is not known; expected 'Authorization: Bearer KEY'.",
            "invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return matches[0]


def _again(body: bytes, receive: Receive) -> Receive:
    """Return what gives a body that was read, and then goes on as before."""
    inputs = False

    async def once() -> MutableMapping[str, Any]:
        nonlocal inputs
        if inputs:
            return await receive()
        inputs = True
        return {"type": "http.request", "body": body, "more_body": False}

    return once


async def _answer(refusal: Refusal, send: Send) -> None:
    headers = {"content-type": "application/json", **refusal.headers}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": raw})
    await send({"type": "http.response.body", "body": json.dumps(refusal.body()).encode()})
