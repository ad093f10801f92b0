"""Responses in OpenAI's form for every error of a request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ragspec.errors import (
    DocumentError,
    EngineClosedError,
    InputError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
    RagspecError,
    StoreError,
    UnknownNameError,
)

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {408: "timeout", 413: "too_large"}
# The first that fits decides status and code.
STATUSES: tuple[tuple[type[Exception], int, str | None], ...] = (
    (PromptTooLongError, 400, "context_length_exceeded"),
    (QueueFullError, 429, "queue_full"),
    (EngineClosedError, 503, "stopping"),
    (UnknownNameError, 400, "unknown_name"),
    *((kind, 400, None) for kind in (InputError, DocumentError, StoreError, ModelError)),
    (RagspecError, 500, None),
)


class ApiError(HTTPException):
    """An error with its HTTP status, and `code` and `param` of OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.code = code
        self.param = param

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's form."""
        usual = "invalid_request_error" if self.status_code < 500 else "server_error"
        record = {"message": self.detail, "type": TYPES.get(self.status_code, usual)}
        return {"error": {**record, "param": self.param, "code": self.code}}


def as_api_error(error: Exception) -> ApiError:
    """Return the error for the client; an unexpected one shows only its type."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestValidationError):
        return _invalid(error)
    if isinstance(error, HTTPException):
        code = CODES.get(error.status_code)
        return ApiError(error.status_code, f"{error.detail}.", code, headers=error.headers)
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            stopping = "the server is stopping; ask another one."
            headers = {"Retry-After": "1"} if status == 429 else None  # seconds
            message = stopping if status == 503 else str(error)
            return ApiError(status, message, code, headers=headers)
    return ApiError(500, f"the request failed with {type(error).__name__}; see the server's log.")


def error_response(error: Exception) -> JSONResponse:
    """Return the response to a request that failed."""
    failure = as_api_error(error)
    return JSONResponse(failure.body(), failure.status_code, failure.headers)


def add_error_handlers(app: FastAPI) -> None:
    """Answer errors of the library and of requests in OpenAI's form."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    for kind in (RagspecError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, answer)


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the first error of a request, with its field."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"Expected JSON as the body, got something else ({reason}).")
    if isinstance(first.get("input"), bytes):  # a type that a browser sends to any site
        return ApiError(400, "Expected Content-Type: application/json, got another type.")
    param = _field(first["loc"], error.body, first["type"] == "missing")
    text = repr(first.get("input"))
    got = text if len(text) < 100 else text[:100] + "..."
    return ApiError(400, f"{param or 'the body'}: {first['msg']}; got {got}.", first["type"], param)


def _field(path: Sequence[str | int], body: Any, missing: bool) -> str | None:
    """Return the path of an error, of the names and numbers that the body itself has.

    Other parts of the path are members of unions. With `missing` the body lacks the last name.
    """
    names: list[str] = []
    for number, part in enumerate(path[1:], start=2):
        held = isinstance(body, Mapping) and part in body
        held = held or (isinstance(body, list) and isinstance(part, int) and part < len(body))
        if held:
            body = body[part]
        if held or (missing and number == len(path)):
            names.append(str(part))
    return ".".join(names) or None
