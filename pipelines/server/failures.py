"""Errors in OpenAI's form, from the library's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ragspec.errors import (
    DocumentError,
    InputError,
    ModelError,
    PoolClosedError,
    PromptTooLongError,
    QueueFullError,
    RagspecError,
    StoreError,
    UnknownNameError,
)

RETRY_AFTER = "1"  # seconds


class Refusal(Exception):
    """A request that is answered by an error.

    status: of HTTP. code, param: as in OpenAI's form.
    """

    def __init__(
        self,
        status: int,
        message: str,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return it in OpenAI's form."""
        record = {"message": self.message, "type": kind_of(self.status)}
        return {"error": {**record, "param": self.param, "code": self.code}}


def kind_of(status: int) -> str:
    """Return OpenAI's word for a status."""
    known = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return known.get(status, "invalid_request_error" if status < 500 else "server_error")


def refusal_of(error: BaseException) -> Refusal:
    """Return how an error is told to a caller; what nobody expected says no more than its kind."""
    if isinstance(error, Refusal):
        return error
    if isinstance(error, PromptTooLongError):
        return Refusal(400, str(error), "context_length_exceeded", "messages")
    if isinstance(error, QueueFullError):
        return Refusal(429, str(error), "queue_full", headers={"Retry-After": RETRY_AFTER})
    if isinstance(error, PoolClosedError):
        return Refusal(503, "the server is stopping; expected one that runs.", "stopping")
    if isinstance(error, UnknownNameError):
        return Refusal(400, str(error), "unknown_name")
    if isinstance(error, InputError | DocumentError | StoreError | ModelError):
        return Refusal(400, str(error))
    if isinstance(error, RagspecError):
        return Refusal(500, str(error))
    return Refusal(500, f"the text failed with {type(error).__name__}; the server's log has more.")
