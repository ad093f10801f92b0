"""Texts are cancelled by a disconnect, and freed at once when they end."""

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from prometheus_client import generate_latest

from ragspec.engine.engine import Engine
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from tests.support.served import NAME, events, hang_up, post, served
from tests.support.waiting import until

LONG = {"model": NAME, "prompt": "A draft", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


def test_a_disconnect_before_the_first_byte_cancels_all_samples(instance: Engine) -> None:
    body = json.dumps({**LONG, "stream": True, "n": 2}).encode()
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "query_string": b""}
    scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions"}
    scope |= {"headers": [(b"content-type", b"application/json")]}

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    serving = Serving(instance, NAME)
    try:
        asyncio.run(build_app(serving, ServerSettings())(scope, receive, send))
        until(lambda: serving.scheduler.open_requests == 0)
        page = generate_latest(serving.metrics.registry).decode()
        assert 'ragspec_texts_total{reason="cancelled"} 2.0' in page
    finally:
        serving.close(0.0)


def test_ended_texts_are_freed_without_the_garbage_collector(
    instance: Engine, uncollected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    handles: list[weakref.ref[Any]] = []
    submit = Serving.submit

    def noted(*inputs: Any) -> Any:
        result = submit(*inputs)
        handles.extend(weakref.ref(held) for each in result.handles for held in (each, each.future))
        return result

    monkeypatch.setattr(Serving, "submit", noted)
    short = {**LONG, "max_tokens": 12}
    with served(instance) as (client, serving):
        assert post(client, {**short, "n": 2}).status_code == 200
        assert len(events(post(client, {**short, "stream": True}))) > 1
        assert len(handles) == 6
        until(lambda: not any(each() for each in handles))
        hang_up(client, serving, {**LONG, "stream": True})
        gc.collect()  # a cancelled stream leaves a cycle of tracebacks
        assert len(handles) == 8
        until(lambda: not any(each() for each in handles))
