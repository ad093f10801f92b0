"""Texts end with their answer, however it ends, and leave nothing behind."""

import asyncio
import gc
import json
import weakref
from typing import Any

import pytest
from prometheus_client import generate_latest

from ragspec.engine.engine import Engine
from ragspec.pipelines.answering.answer import NO_ANSWER_TEXT
from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.retrievers import Document, PassageIndex
from tests.support.served import NAME, events, hang_up, parts_of, post, served, text_of
from tests.support.waiting import until

LONG = {"model": NAME, "prompt": "A draft", "temperature": 0, "max_tokens": 400, "ignore_eos": True}


def request(body: dict[str, Any]) -> tuple[dict[str, Any], Any]:
    """Return an ASGI request of a caller that leaves as soon as it has asked."""
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "query_string": b""}
    scope |= {"path": "/v1/completions", "raw_path": b"/v1/completions"}
    scope |= {"headers": [(b"content-type", b"application/json")]}
    query = {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
    messages = iter([query])

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    return scope, receive


async def blocked(message: Any) -> None:
    await asyncio.Event().wait()


def test_texts_end_where_the_caller_left_before_the_first_byte(instance: Engine) -> None:
    serving = Serving(instance, NAME)
    app = build_app(serving, ServerSettings())
    scope, receive = request({**LONG, "stream": True, "n": 2})
    try:
        asyncio.run(app(scope, receive, blocked))
        until(lambda: serving.scheduler.open_requests == 0)
        page = generate_latest(serving.metrics.registry).decode()
        assert 'ragspec_texts_total{reason="cancelled"} 2.0' in page
    finally:
        serving.close(0.0)


def test_no_text_waits_for_the_garbage_collector(
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


@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_says_that_no_document_speaks_of_it(instance: Engine, stream: bool) -> None:
    index = PassageIndex.build([Document("a.txt", "A", "Drafts are verified.")], embedder=None)
    messages = [{"role": "user", "content": "Who won the cup in Uruguay?"}]
    body = {"model": NAME, "messages": messages, "n": 3, "stream": stream}
    with served(instance, documents=DocQA(index, engine=instance)) as (client, _):
        result = post(client, body)
    lines = parts_of(result, stream)
    assert {choice["index"] for each in lines for choice in each["choices"]} == {0, 1, 2}
    assert [text_of(lines, index) for index in range(3)] == [NO_ANSWER_TEXT] * 3
