"""A server that runs in a thread of the test, on this machine alone."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import torch
from fastapi import FastAPI

from ragspec.engine.engine import Engine
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.run import Server
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from tests.support import tiny
from tests.support.waiting import until

NAME = "tiny"


def engine(*, chat: bool = True, drafter: Any = "context", **changes: Any) -> Engine:
    """Return an engine over a tiny model that is exact to the last bit."""
    model = tiny.model("llama", dtype=torch.float64, **{"seed": 4, **changes})
    return Engine(model, tiny.tokenizer(chat=chat), drafter=drafter, budget=6)


@contextmanager
def listening(app: FastAPI, settings: ServerSettings | None = None) -> Iterator[str]:
    """Run an application; yield its address once it is ready."""
    server = Server(app, replace(settings or ServerSettings(), port=0))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def served(
    instance: Engine | None = None, settings: ServerSettings | None = None, **options: Any
) -> Iterator[tuple[httpx.Client, Serving]]:
    """Serve an engine; yield a client of it and what is served."""
    settings = settings or ServerSettings()
    serving = Serving(instance or engine(), NAME, settings=settings, **options)
    app = build_app(serving, settings)
    with listening(app, settings) as address, httpx.Client(base_url=address, timeout=60) as client:
        yield client, serving


def post(client: httpx.Client, body: Any) -> httpx.Response:
    """Send a request for a chat if it has messages, else for a completion."""
    path = "chat/completions" if "messages" in body else "completions"
    return client.post(f"/v1/{path}", json=body)


def raw_request(path: str, body: Any) -> bytes:
    """Return the bytes of a POST request."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    return head.encode() + b"Content-Type: application/json\r\n\r\n" + raw


def connected(client: httpx.Client, sent: bytes = b"") -> socket.socket:
    """Return a connection to the server of a client, after sending some bytes."""
    line = socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)
    line.sendall(sent)
    return line


def hang_up(client: httpx.Client, serving: Serving, body: dict[str, Any]) -> None:
    """Request a completion, and close the connection once the text is being written."""
    with connected(client, raw_request("/v1/completions", body)):
        until(lambda: serving.scheduler.live == 1)
    until(lambda: serving.scheduler.live == 0)


def events(response: httpx.Response) -> list[Any]:
    """Return the events of a stream; check its last line."""
    lines = [line for line in response.read().decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def parts_of(response: httpx.Response, stream: bool) -> list[Any]:
    """Return the parts of a stream, or the one object of a whole answer."""
    return events(response) if stream else [response.json()]


def text_of(result: list[Any], index: int = 0) -> str:
    """Return the text of one choice of the parts of an answer."""
    choices = [choice for each in result for choice in each["choices"] if choice["index"] == index]
    messages = [choice.get("delta", choice.get("message")) for choice in choices]
    return "".join(
        choice["text"] if message is None else message.get("content", "")
        for choice, message in zip(choices, messages, strict=True)
    )
