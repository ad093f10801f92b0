"""Images over HTTP: equal to the pipeline's, and cancelled by a disconnect or a stop."""

import base64
import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from PIL import Image
from prometheus_client import generate_latest

from ragspec.engine.engine import Engine
from ragspec.errors import EngineClosedError, InputError, QueueFullError
from ragspec.pipelines.server import app, run
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings
from ragspec.visual import ImagePipeline
from tests.support.served import NAME, connected, raw_request, served
from tests.support.waiting import until


def generate(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/images/generations", json=body)


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


def test_images_equal_those_of_the_pipeline(
    instance: Engine, pipe: ImagePipeline, pair: tuple[httpx.Client, Serving]
) -> None:
    client, _ = pair
    sampling = {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.01}
    settings = {"seed": 5, "negative_prompt": "blue", "guidance_scale": 3.0, **sampling}
    request: dict[str, Any] = {"prompt": "red heart", "n": 2, **settings}
    result = generate(client, **request).json()
    sample = pipe("red heart", num_images_per_prompt=2, **settings)
    for message, image in zip(result["data"], sample.images, strict=True):
        png = Image.open(io.BytesIO(base64.b64decode(message["b64_json"])))
        assert png.tobytes() == image.tobytes()
    assert result["metrics"]["speculative_decoding"]["label"] == sample.label
    assert "emoji" in [each["id"] for each in client.get("/v1/models").json()["data"]]
    for bad, status in (({"model": "x"}, 404), ({"size": "7"}, 400), ({"size": "9x9"}, 400)):
        assert generate(client, **{**request, **bad}).status_code == status
    unsupported = {"rule": "lantern", "drafter": "none", "codes": [1], "height": 32}
    unsupported |= {"cfg": 1.0, "cfg_interval": 9, "lora": "x", "strength": 0.5, "quality": "hd"}
    unsupported |= {"repetition_penalty": 1.2, "input_image": "x", "scheduler": "euler"}
    for name, value in {"size": "64x64", "stream": True, **unsupported}.items():
        error = generate(client, **request, **{name: value}).json()["error"]
        assert error["param"] == name
        assert name != "size" or error["message"] == "got size='64x64'; expected auto or 32x32."
    hint = generate(client, prompt="x", cfg=3.0).json()["error"]["message"]
    assert hint == "cfg: expected none. Did you mean guidance_scale?"
    neutral = {"presence_penalty": 0.0, "logit_bias": {}, "quality": "auto", "style": "vivid"}
    ignored = generate(client, **request, **neutral).headers["X-Ignored-Fields"]
    assert ignored == "style"
    error = generate(client, model="tiles", prompt="1", negative_prompt="x").json()["error"]
    assert error["param"] == "negative_prompt"
    for subject in ("cat", "-1", "9" * 3999):
        error = generate(client, model="tiles", prompt=subject).json()["error"]
        assert error["param"] == "prompt" and len(error["message"]) < 800
    with served(instance) as (client, _):
        assert generate(client, prompt="x").status_code == 404
    with pytest.raises(InputError, match=r"two models emoji; .* --set name=NAME"):
        Serving(instance, "emoji", images={"emoji": pipe})


def test_a_disconnect_cancels_images(
    pair: tuple[httpx.Client, Serving], pipe: ImagePipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, serving = pair
    passes, first, proceed, outs = [0], threading.Event(), threading.Event(), list[Any]()
    draw = app.draw

    def slow(body: Any, serving: Serving, gone: Any) -> Any:
        def after_pass() -> bool:
            passes[0] += 1
            first.set()
            assert proceed.wait(20)
            return bool(gone())

        outs.append(draw(body, serving, after_pass))
        return outs[-1]

    monkeypatch.setattr(app, "draw", slow)
    raw = raw_request("/v1/images/generations", {"prompt": "red heart", "seed": 5})
    with connected(client, raw):
        assert first.wait(20)
        with connected(client, raw):
            until(lambda: len(serving.running_alone) == 2)
    until(lambda: len(serving.running_alone) == 1)  # the waiting request never starts
    counted = 'ragspec_requests_total{route="/v1/images/generations",status="499"} '
    until(lambda: f"{counted}2.0" in generate_latest(serving.metrics.registry).decode())
    proceed.set()
    until(lambda: len(serving.running_alone) == 0)
    assert passes[0] <= 3  # the next pass ends the image; its end counts too
    assert [out["metrics"]["speculative_decoding"]["label"] for out in outs] == ["unfinished"]


@pytest.mark.parametrize("cooperative", [True, False])
def test_images_that_a_stop_cuts_short_get_status_503(
    instance: Engine, pipe: ImagePipeline, monkeypatch: pytest.MonkeyPatch, cooperative: bool
) -> None:
    started, proceed = threading.Event(), threading.Event()
    monkeypatch.setattr(run, "MARGIN", 0)
    draw = app.draw

    def slow(*request: Any) -> dict[str, Any]:
        started.set()
        while cooperative:
            draw(*request)
        return {"data": proceed.wait(20)}

    monkeypatch.setattr(app, "draw", slow)
    with ThreadPoolExecutor(2) as other:
        settings = ServerSettings(drain=0.0, max_queue_size=1)
        with served(instance, settings, images={"emoji": pipe}) as (client, serving):
            url, body = f"{client.base_url}/v1/images/generations", {"prompt": "red heart"}
            cut = [other.submit(httpx.post, url, json=body, timeout=60) for _ in range(2)]
            assert started.wait(20)
            until(lambda: len(serving.running_alone) == 2)
            with pytest.raises(QueueFullError):
                serving.submit_alone(dict)
            serving.close(0.0)  # as a second signal does
            until(lambda: sum(each.done() for each in cut) == 1 + cooperative)
        for each in cut:
            assert each.result().status_code == 503
            assert each.result().json()["error"]["code"] == "stopping"
        proceed.set()


def test_running_images_have_the_drain_time_to_end(instance: Engine) -> None:
    serving = Serving(instance, NAME)
    stopped = serving.submit_alone(lambda: serving.stopped.wait(0.3))
    serving.close(20.0)
    assert not stopped.result()
    with pytest.raises(EngineClosedError):
        serving.submit_alone(dict)
