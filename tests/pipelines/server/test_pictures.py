"""Pictures over HTTP: those of the pipeline, and none for a caller that has left."""

import base64
import io
import json
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image
from prometheus_client import generate_latest

from ragspec.engine.engine import Engine
from ragspec.errors import QueueFullError
from ragspec.pipelines.server import app, run
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.visual import ImagePipeline
from tests.support.calls import noted
from tests.support.served import served
from tests.support.waiting import until


@pytest.fixture(scope="module")
def pipe() -> ImagePipeline:
    result = ImagePipeline.from_pretrained("emoji")
    result.set_progress_bar_config(disable=True)
    return result


@pytest.fixture(scope="module")
def pair(instance: Engine, pipe: ImagePipeline) -> Iterator[tuple[httpx.Client, Serving]]:
    tiles = ImagePipeline.from_pretrained("tiles")
    with served(instance, images={"emoji": pipe, "tiles": tiles}) as result:
        yield result


def test_pictures(
    instance: Engine, pipe: ImagePipeline, pair: tuple[httpx.Client, Serving]
) -> None:
    client, _ = pair
    request = {"prompt": "red heart", "n": 2, "seed": 5}
    result = client.post("/v1/images/generations", json=request).json()
    sample = pipe("red heart", num_images_per_prompt=2, seed=5)
    for message, image in zip(result["data"], sample.images, strict=True):
        png = Image.open(io.BytesIO(base64.b64decode(message["b64_json"])))
        assert png.tobytes() == image.tobytes()
    assert result["metrics"]["speculative_decoding"]["label"] == sample.label
    assert "emoji" in [each["id"] for each in client.get("/v1/models").json()["data"]]
    for bad, status in (({"model": "x"}, 404), ({"size": "7"}, 400), ({"size": "9x9"}, 400)):
        assert client.post("/v1/images/generations", json={**request, **bad}).status_code == status
    for name, value in {"size": "64x64", "stream": True}.items():
        error = client.post("/v1/images/generations", json={**request, name: value}).json()["error"]
        assert error["param"] == name
    for subject in ("cat", "-1", "9" * 3999):
        body = {"model": "tiles", "prompt": subject}
        error = client.post("/v1/images/generations", json=body).json()["error"]
        assert error["param"] == "prompt" and len(error["message"]) < 800
    with served(instance) as (client, _):
        assert client.post("/v1/images/generations", json={"prompt": "x"}).status_code == 404


def test_pictures_of_a_caller_that_has_left_are_not_sampled_to_their_end(
    pair: tuple[httpx.Client, Serving], pipe: ImagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, serving = pair
    passes, first, on, outs = [0], threading.Event(), threading.Event(), list[Any]()
    draw = app.draw

    def slow(body: Any, serving: Serving, gone: Any) -> Any:
        def after_pass() -> bool:
            passes[0] += 1
            first.set()
            assert on.wait(20)
            return bool(gone())

        return draw(body, serving, after_pass)

    monkeypatch.setattr(app, "draw", slow)
    monkeypatch.setattr(app, "_metrics", noted(app._metrics, outs, lambda out: out))
    raw = json.dumps({"prompt": "red heart", "seed": 5}).encode()
    head = "POST /v1/images/generations HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    address = (client.base_url.host, client.base_url.port)
    with socket.create_connection(address) as sample, socket.create_connection(address) as waits:
        sample.sendall(head.encode() + raw)
        assert first.wait(20)
        waits.sendall(head.encode() + raw)
        until(lambda: len(serving.running_alone) == 2)
    until(lambda: len(serving.running_alone) == 1)  # the one that waited is never begun
    counted = 'ragspec_requests_total{route="/v1/images/generations",status="499"} '
    until(lambda: f"{counted}2.0" in generate_latest(serving.metrics.registry).decode())
    on.set()
    until(lambda: len(serving.running_alone) == 0)
    assert passes[0] <= 3  # it is known in the next pass, which is told of too, as the end is
    assert [out.label for out in outs] == ["unfinished"]


@pytest.mark.parametrize("heeds", [True, False])
def test_a_stop_is_the_answer_to_pictures_that_it_cuts_short(
    instance: Engine, pipe: ImagePipeline, monkeypatch: pytest.MonkeyPatch, heeds: bool
) -> None:
    begun, on = threading.Event(), threading.Event()
    monkeypatch.setattr(run, "MARGIN", 0)
    draw = app.draw

    def slow(*request: Any) -> dict[str, Any]:
        begun.set()
        while heeds:
            draw(*request)
        return {"data": on.wait(20)}

    monkeypatch.setattr(app, "draw", slow)
    with ThreadPoolExecutor(2) as other:
        settings = ServerSettings(drain=0.0, max_queue_size=1)
        with served(instance, settings, images={"emoji": pipe}) as (client, serving):
            url = f"{client.base_url}/v1/images/generations"
            body = {"prompt": "red heart"}
            cut = [other.submit(httpx.post, url, json=body, timeout=60) for _ in range(2)]
            assert begun.wait(20)
            until(lambda: len(serving.running_alone) == 2)
            with pytest.raises(QueueFullError):
                serving.submit_alone(dict)
            serving.close(0.0)  # as a second signal does
            until(lambda: sum(each.done() for each in cut) == 1 + heeds)
        for each in cut:
            assert each.result().status_code == 503
            assert each.result().json()["error"]["code"] == "stopping"
        on.set()
