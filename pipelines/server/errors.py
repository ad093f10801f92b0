"""Responses in OpenAI's form for every error of a request."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ragspec import errors

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
# The beginning of pydantic's messages, and what they add about lists.
AROUND = re.compile(
    r"^\w+ should (be |have |match )(a valid )?|^Value error, (expected )?| after validation.*"
)
SIZE, TOKEN = r"^(auto|[0-9]{1,5}x[0-9]{1,5})$", r"^[0-9]{1,11}$"
STORE, TEXT = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$", r"\S"
# The expected value, by pydantic's type of the error or the pattern of the text.
EXPECTED = MappingProxyType(
    dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a JSON object")
    | {"extra_forbidden": "none", "missing": "a value", TEXT: "some text"}
    | {"string_unicode": "whole characters"}
    | {SIZE: "auto or a size in pixels such as 256x256", TOKEN: "a token id as the name"}
    | {STORE: "up to 64 letters, digits, dots, dashes and underscores, a letter or digit first"}
)
MESSAGES = MappingProxyType(
    {  # the first is of FastAPI, on JSON that Python cannot read
        400: "Expected JSON in UTF-8 as the body, got something else (CAUSE).",
        404: "Expected one of the paths that /openapi.json lists, got another one.",
        405: "Expected a method that /openapi.json lists for this path, got another one.",
    }
)
# The first that fits decides status and code.
STATUSES: tuple[tuple[type[Exception] | tuple[type[Exception], ...], int, str | None], ...] = (
    (errors.PromptTooLongError, 400, "context_length_exceeded"),
    (errors.QueueFullError, 429, "queue_full"),
    (errors.EngineClosedError, 503, "stopping"),
    (errors.UnknownNameError, 400, "unknown_name"),
    ((errors.InputError, errors.DocumentError, errors.StoreError, errors.ModelError), 400, None),
    (errors.RagspecError, 500, None),
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

    def body(self) -> dict[str, object]:
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
        message = MESSAGES.get(error.status_code, f"{error.detail}.")
        message = message.replace("CAUSE", str(error.__cause__))
        return ApiError(error.status_code, message, headers=error.headers)
    for kind, status, code in STATUSES:
        if isinstance(error, kind):
            headers = {"Retry-After": "1"} if status == 429 else None  # seconds
            message = "the server is stopping; ask another one." if status == 503 else str(error)
            return ApiError(status, message, code, headers=headers)
    return ApiError(500, f"the request failed with {type(error).__name__}; see the server's log.")


@contextmanager
def naming_field(body: BaseModel) -> Iterator[None]:
    """Add the field of a request that the message of an error names.

    It is the first one, or of a context error the last, which the advice would change.
    """
    try:
        yield
    except errors.RagspecError as error:
        failure, fields = as_api_error(error), type(body).model_fields
        newer = getattr(body, "max_completion_tokens", None)
        most = "max_completion_tokens" if newer else "max_tokens"
        failure.detail = failure.detail.replace("min_new_", "min_").replace("max_new_tokens", most)
        words = re.findall(r"\w+", failure.detail.replace("model", ""))  # a word of prose
        words = words[::-1] if isinstance(error, errors.PromptTooLongError) else words
        others = {"height": "size", "width": "size", "class": "prompt", "prompt": "messages"}
        names = [word if word in fields else others.get(word) for word in words]
        failure.param = next((name for name in [*names, "path"] if name in fields), None)
        raise failure from error


async def error_response(request: Request | None, error: Exception) -> JSONResponse:
    """Return the response to a request that failed."""
    failure = as_api_error(error)
    return JSONResponse(failure.body(), failure.status_code, failure.headers)


HANDLERS: dict[int | type[Exception], Any] = dict.fromkeys(
    (errors.RagspecError, RequestValidationError, HTTPException), error_response
)


def _invalid(error: RequestValidationError) -> ApiError:
    """Return the error of a request that got furthest, with its field.

    A value that may be of several types has an error for each; one of a value of the right type, or
    else inside a value, got further than one that expected another type.
    """
    failures = [(each, _field(each, error.body)) for each in error.errors()]
    first, path = failures[0]
    if first["type"] == "json_invalid":
        reason = first["ctx"]["error"]
        return ApiError(400, f"Expected JSON as the body, got something else ({reason}).")
    if isinstance(first.get("input"), bytes):  # a type that a browser sends to any site
        return ApiError(400, "Expected Content-Type: application/json, got another type.")
    failures = [each for each in failures if each[1][:1] == path[:1]]
    best, path = max(failures, key=lambda each: (not _expects_type(each[0]), len(each[1])))
    alike = [each for each, where in failures if where == path] if _expects_type(best) else [best]
    reasons = [each.get("ctx", {}).get("pattern", each["type"]) for each in alike]
    words = [AROUND.sub("", str(each["msg"])) for each in alike]
    expected = " or ".join(dict.fromkeys(map(EXPECTED.get, reasons, words)))
    got, param = repr(best.get("input")), ".".join(path) or None
    got = "nothing" if best["type"] == "missing" else got[:100] + "..." * (len(got) > 100)
    message = f"{param or 'the body'}: expected {expected}, got {got}."
    return ApiError(400, message, best["type"], param)


def _expects_type(error: Mapping[str, object]) -> bool:
    return str(error["type"]).endswith(("_type", "literal_error", "missing"))


def _field(error: Any, body: Any) -> list[str]:
    """Return the path of an error, of the names and numbers that the body itself has.

    Other parts of pydantic's path are members of unions. The body lacks a last name that is
    missing.
    """
    names: list[str] = []
    _, *path = error["loc"]
    for number, part in enumerate(path, start=1):
        try:
            body = body[part]
        except (LookupError, TypeError):  # no such name, or no container
            if error["type"] != "missing" or number < len(path):
                continue
        names.append(str(part))
    return names
