"""Routes whose every error is answered in OpenAI's form."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from ragspec.pipelines.server.failures import Refusal, refusal_of

log = logging.getLogger("ragspec.server")


def routed(app: FastAPI) -> FastAPI:
    """Let the routes that are added to an application answer errors in OpenAI's form."""
    app.router.route_class = _Route
    app.add_exception_handler(HTTPException, _unserved)
    return app


class _Route(APIRoute):
    """Answers every error in OpenAI's form."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what serves a request."""
        serve = super().get_route_handler()

        async def served(request: Request) -> Response:
            try:
                return await serve(request)
            except RequestValidationError as error:
                return _answer(_invalid(error))
            except HTTPException:
                raise
            except Exception as error:
                refusal = refusal_of(error)
                if refusal.status == 500:
                    log.exception("%s failed", request.url.path)
                return _answer(refusal)

        return served


def _answer(refusal: Refusal) -> Response:
    return JSONResponse(refusal.body(), refusal.status, refusal.headers)


def _invalid(error: RequestValidationError) -> Refusal:
    """Return what is wrong with a request, its first fault by name."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return Refusal(400, f"got a body that is no JSON ({first['ctx']['error']}); expected JSON.")
    if isinstance(first.get("input"), bytes):  # what a browser would send to any site unasked
        return Refusal(400, "got a body of another type; expected Content-Type: application/json.")
    param = _field(first["loc"], error.body, first["type"] == "missing")
    text = repr(first.get("input"))
    got = text if len(text) < 100 else text[:100] + "..."
    message = f"{param or 'the body'}: {first['msg']}; got {got}."
    return Refusal(400, message, first["type"], param)


def _field(where: Sequence[str | int], body: Any, missing: bool) -> str | None:
    """Return the field that a fault is in, by the names and numbers that the body itself has.

    What else stands in its place are members of unions, which are no caller's matter. missing: the
    last name is of a field that the body lacks.
    """
    results: list[str] = []
    for number, part in enumerate(where[1:], start=2):
        held = isinstance(body, Mapping) and part in body
        held = held or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        if held:
            body = body[part]
        if held or (missing and number == len(where)):
            results.append(str(part))
    return ".".join(results) or None


async def _unserved(request: Request, error: Exception) -> Response:
    """Answer what no route serves."""
    assert isinstance(error, HTTPException)
    refusal = Refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}.")
    refusal.headers = dict(error.headers or {})
    return _answer(refusal)
