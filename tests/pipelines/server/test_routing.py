"""What is wrong with a request is told by the field that it is in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.support.served import NAME, served

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with served() as (client, _):
        yield client


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"stop": 7}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": ["x"] * 100}, "stop"),
        ({"budget": "many"}, "budget"),
        ({"drafter": []}, "drafter"),
        ({"n": 0}, "n"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"logit_bias": {"7": "x"}}, "logit_bias.7"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content"),
        ({"documents": [{"title": "x"}]}, "documents.0.text"),
        ({"documents": ["x", 7]}, "documents.1"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_an_error_names_the_field_of_the_request(
    client: httpx.Client, body: dict[str, Any], param: str
) -> None:
    whole = {"model": NAME, "messages": MESSAGES, **body}
    result = client.post("/v1/chat/completions", json=whole)
    error = result.json()["error"]
    assert (result.status_code, error["param"]) == (400, param), error
    assert error["message"].startswith(f"{param}: ")


def test_a_field_that_lacks_is_named(client: httpx.Client) -> None:
    result = client.post("/v1/completions", json={"model": NAME})
    assert result.json()["error"]["param"] == "prompt"
    assert client.post("/v1/completions", json=[1]).json()["error"]["param"] is None
