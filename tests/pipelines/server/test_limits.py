"""Limits and access: load, disconnects, idle clients, deadlines, keys, hosts and tenants."""

import asyncio
import gc
import json
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest

from ragspec.engine.engine import Engine
from ragspec.engine.handle import RequestHandle
from ragspec.engine.request import Options
from ragspec.engine.scheduler import Scheduler
from ragspec.engine.sequence import Sequence
from ragspec.errors import InputError
from ragspec.pipelines.server import access, run
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving, tenant_of
from ragspec.pipelines.server.settings import ServerSettings, read_keys
from ragspec.pipelines.server.streams import EventStream
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.verification.sequence_cache import slot_bytes
from tests.support.served import NAME, connected, hang_up, listening, post, served
from tests.support.waiting import until

PROMPT = "A draft model proposes several tokens and the target"
LONG = {"model": NAME, "prompt": PROMPT, "temperature": 0, "max_tokens": 100, "ignore_eos": True}
SHORT = {**LONG, "max_tokens": 4}


@pytest.fixture
def limited(instance: Engine) -> Iterator[tuple[httpx.Client, Serving]]:
    with served(instance, ServerSettings(max_batch_size=2, max_queue_size=1)) as result:
        yield result


def test_requests_beyond_the_queue_get_status_429(limited: tuple[httpx.Client, Serving]) -> None:
    client, serving = limited
    with ThreadPoolExecutor(12) as callers:
        results = list(callers.map(lambda _: post(client, LONG), range(12)))
    statuses = sorted(each.status_code for each in results)
    assert set(statuses) == {200, 429} and statuses.count(200) >= 3
    surplus = next(each for each in results if each.status_code == 429)
    assert surplus.headers["retry-after"].isdecimal()
    assert surplus.json()["error"]["code"] == "queue_full"
    texts = {each.json()["choices"][0]["text"] for each in results if each.status_code == 200}
    assert len(texts) == 1
    assert serving.scheduler.live == serving.scheduler.waiting == 0


def test_all_samples_of_a_request_are_queued_or_none(limited: tuple[httpx.Client, Serving]) -> None:
    client, serving = limited
    with ThreadPoolExecutor(1) as other:
        alone = other.submit(client.post, "/v1/completions", json=LONG)
        until(lambda: serving.scheduler.live == 1)
        assert post(client, {**SHORT, "n": 3}).status_code == 429
        assert alone.result().status_code == 200
    until(lambda: serving.scheduler.open_requests == 0)
    assert post(client, {**SHORT, "n": 3}).status_code == 200
    for n, field in (2, "n"), (1, "prompt"):  # a retry would not help
        error = post(client, {**SHORT, "prompt": ["a"] * 5, "n": n}).json()["error"]
        assert error["param"] == field and "3 at most" in error["message"]
    assert client.head("/health").status_code == 200


def test_a_large_body_is_refused(
    limited: tuple[httpx.Client, Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, _ = limited
    monkeypatch.setattr(access, "BODY_BYTES", 5000)
    body = json.dumps({**SHORT, "prompt": "x" * 6000}).encode()
    result = client.post("/v1/completions", content=body)
    assert result.status_code == 413 and result.json()["error"]["code"] == "too_large"
    parts = (body[start : start + 1000] for start in range(0, len(body), 1000))
    assert client.post("/v1/completions", content=parts).status_code == 413


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_cancels_the_text(limited: tuple[httpx.Client, Serving], stream: bool) -> None:
    client, serving = limited
    for _ in range(5):
        hang_up(client, serving, {**LONG, "stream": stream})
    page = client.get("/metrics").text
    ended = next(line for line in page.splitlines() if 'reason="cancelled"' in line)
    assert float(ended.split()[-1]) == 5


@pytest.mark.parametrize("reads", [False, True])
def test_a_stream_is_released_when_it_ends_or_is_not_read(reads: bool) -> None:
    ended: list[str] = []

    async def lines() -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            if not reads:
                await asyncio.Event().wait()
        finally:
            ended.append("closed")

    async def send(message: Any) -> None:
        assert "released" not in ended
        if message["type"] == "http.response.body" and not reads:
            await asyncio.Event().wait()

    async def silent() -> Any:
        await asyncio.Event().wait()

    stream = EventStream(lines(), lambda: ended.append("released"), 1.0 if reads else 0.1)
    began = time.monotonic()
    asyncio.run(stream({"type": "http", "method": "GET"}, silent, send))
    assert sorted(ended) == ["closed", "released"] and time.monotonic() - began < 5


@pytest.mark.parametrize("stage", ["step", "report"])
def test_a_failing_text_does_not_affect_another(
    instance: Engine, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    add, generation = Scheduler.add, Sequence.generation

    def adding(scheduler: Scheduler, handle: RequestHandle) -> None:
        if stage == "step" and len(handle.request.prompt) == 3:
            failing = Mock(side_effect=RuntimeError("secret"))
            handle.request = replace(handle.request, on_step=failing)
        add(scheduler, handle)

    def reporting(sequence: Sequence) -> Any:
        if stage == "report" and len(sequence.request.prompt) == 3:
            raise ValueError("secret")
        return generation(sequence)

    monkeypatch.setattr(Scheduler, "add", adding)
    monkeypatch.setattr(Sequence, "generation", reporting)
    with served(instance) as (client, serving):
        selection = post(client, LONG).json()["choices"][0]["text"]
        with ThreadPoolExecutor(1) as other:
            running = other.submit(post, client, LONG)
            result = post(client, {**SHORT, "prompt": "abc"})
            message = post(client, {**SHORT, "prompt": "abc", "stream": True}).text
        assert result.status_code == 500 and "secret" not in result.text + message
        assert result.json()["error"]["type"] == "server_error" and "server_error" in message
        assert running.result().json()["choices"][0]["text"] == selection
        assert serving.scheduler.live == 0


def status_of(client: httpx.Client, key: str | None, path: str = "/v1/models") -> int:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return client.get(path, headers=headers).status_code


def test_api_keys_and_the_admin_key(instance: Engine) -> None:
    with served(instance, ServerSettings(keys=["alpha", "beta"], admin_key="root")) as (client, _):
        ask = partial(status_of, client)
        assert [ask(key) for key in (None, "gamma", "alpha", "beta")] == [401, 401, 200, 200]
        assert [ask(None, f"/{p}") for p in ("health", "metrics", "docs")] == [200, 401, 404]
        for path in ("/admin/stores", "/metrics"):
            assert ask("alpha", path) == 401 and ask("root", path) == 200
        assert ask("root") == 401
        refused = client.get("/metrics", headers={"Authorization": "Bearer alpha"}).json()["error"]
        assert refused["message"].endswith("with the admin key, got another one.")
        assert client.get("/v1/models", headers={"Authorization": "Basic alpha"}).status_code == 401
    assert read_keys([" gamma\n", "\tdelta "]) == ["gamma", "delta"]  # from files and shells
    with served(instance, ServerSettings(keys=["alpha"])) as (client, _):
        assert status_of(client, "alpha", "/admin/stores") == 403


def test_keys_of_a_file_change_without_a_restart(instance: Engine, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for text in (None, "", "\u00e9", "alpha\nbeta  # Ann, sales", "#alpha"):
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError, match="key"):
            ServerSettings(keys=[f"@{path}"])
    path.write_text("alpha\r\n\n beta\n", "utf-8-sig")
    with served(instance, ServerSettings(keys=[f"@{path}"])) as (client, _):
        ask = partial(status_of, client)
        assert [ask(key) for key in ("alpha", "beta", f"@{path}")] == [200, 200, 401]
        path.write_text("beta\ngamma")
        assert [ask(key) for key in ("alpha", "beta", "gamma")] == [401, 200, 200]
        path.unlink()
        assert ask("beta") == 503


@pytest.mark.parametrize("origins", [(), ("https://page.example",), ("*",)])
def test_cors_allows_the_listed_origins_alone(instance: Engine, origins: tuple[str, ...]) -> None:
    headers = {"access-control-request-method": "POST", "origin": "https://page.example"}
    headers |= {"access-control-request-headers": "authorization,content-type"}
    with served(instance, ServerSettings(keys=["alpha"], cors=origins)) as (client, _):
        preflight = client.options("/v1/completions", headers=headers)
        assert preflight.status_code == (200 if origins else 405)
        refused = client.post("/v1/completions", headers={"origin": "https://page.example"})
        allowed = [each.headers.get("access-control-allow-origin") for each in (preflight, refused)]
        assert refused.status_code == 401 and allowed == [next(iter(origins), None)] * 2
        other = client.get("/v1/models", headers={"origin": "https://other.example"}).headers
        assert ("access-control-allow-origin" in other) is (origins == ("*",))


def test_max_model_len_bounds_the_context(instance: Engine) -> None:
    with served(instance, ServerSettings(max_model_len=80)) as (client, _):
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] == 80
        error = post(client, LONG).json()["error"]
        assert error["message"].startswith("This model's maximum context length is 80 tokens")
        assert post(client, {**LONG, "max_tokens": -1}).json()["usage"]["total_tokens"] == 80
    for bad in (1, 513):
        with pytest.raises(InputError, match=f"max_model_len is {bad}; .* context .512"):
            Serving(instance, NAME, settings=ServerSettings(max_model_len=bad))


def test_requests_wait_for_kv_memory(instance: Engine) -> None:
    each = slot_bytes(instance.model.config, instance.target.dtype)
    settings = ServerSettings(max_batch_size=4, kv_memory=520 * each)
    live, held = set[int](), set[int]()
    bodies = [{**LONG, "prompt": f"{number}. {PROMPT}"} for number in range(6)]
    with served(instance, settings) as (client, serving), ThreadPoolExecutor(6) as pool:
        scheduler, step = serving.scheduler, serving.scheduler.step

        def noted() -> bool:
            session = scheduler.session
            running = [] if session is None else list(session.caches.values())
            held.add(scheduler.prefix_cache.bytes + sum(cache.bytes for cache in running))
            live.add(scheduler.live)
            return step()

        scheduler.step = noted  # type: ignore[method-assign, assignment]
        waiting = [pool.submit(post, client, body) for body in bodies]
        texts = [result.result().json()["choices"][0]["text"] for result in waiting]
        error = post(client, {**LONG, "max_tokens": 400}).json()["error"]
        assert error["code"] == "context_length_exceeded"
    options = Options(max_new_tokens=100, ignore_eos=True)
    assert texts == [instance.generate(str(b["prompt"]), **options).text for b in bodies]
    assert max(live) == 2 and 300 * each < max(held) <= 520 * each
    with pytest.raises(InputError, match=f"kv_memory is {each} bytes; expected"):
        Serving(instance, NAME, settings=ServerSettings(kv_memory=each))


def test_loaded_models_are_exempt_from_garbage_collection(
    instance: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [gc.get_freeze_count()]

    def until_loaded(server: Any, sockets: Any) -> None:
        until(lambda: server.config.app.state.routes.serving is not None)
        counts.append(gc.get_freeze_count())
        gc.unfreeze()

    monkeypatch.setattr(run.Server, "run", until_loaded)
    settings = ServerSettings(port=0)
    with settings.listen() as listening:
        run.serve(lambda: Serving(instance, NAME), settings, listening)
    assert counts[1] > counts[0] + 10_000


def test_stores_are_added_while_running(instance: Engine, tmp_path: Path) -> None:
    with served(instance) as (client, _):
        selection = post(client, LONG).json()["choices"][0]["text"]
        text = f"{PROMPT}{selection}"
        CorpusIndex.build([text], instance.tokenizer, tmp_path / "store").close()
        added = {"name": "answers", "path": str(tmp_path / "store")}
        result = client.post("/admin/stores", json=added)
        assert result.status_code == 201 and result.json()["tokens"] >= len(text)
        assert [each["id"] for each in client.get("/admin/stores").json()["data"]] == ["answers"]
        drafted = post(client, {**LONG, "budget": 8}).json()
        assert drafted["choices"][0]["text"] == selection
        message = drafted["metrics"]["speculative_decoding"]
        assert message["accepted_by_source"]["answers"] > 50
        for store_name in ("answers", None):
            message = post(client, {**LONG, "budget": 8, "store": store_name}).json()["metrics"]
            by_source = message["speculative_decoding"]["accepted_by_source"]
            assert ("answers" in by_source) is (store_name is not None)
        bad = [(added, "name"), ({**added, "x": 1}, "x")]
        paths = ("nowhere", "a\0b", "x" * 4000, str(tmp_path))
        for body, field in bad + [({"name": "other", "path": path}, "path") for path in paths]:
            result = client.post("/admin/stores", json=body)
            assert (result.status_code, (error := result.json()["error"])["param"]) == (400, field)
            assert field != "x" or error["message"] == "x: expected none, got 1."


def test_drafters_of_tenants_are_separate(instance: Engine) -> None:
    with served(instance) as (client, serving):
        body = {**LONG, "max_tokens": 40, "drafter": "hierarchy", "budget": 6}

        def drafted(user: str | None) -> int:
            result = post(client, body if user is None else {**body, "user": user}).json()
            return int(result["metrics"]["speculative_decoding"]["num_accepted_tokens"])

        first, second = drafted("ann"), drafted("ann")
        assert drafted("bob") == first == drafted(None)
        assert second != first  # it has learnt from the first
        tenants = [tenant_of(None, user) for user in ("ann", "bob")]
        one, other = (serving.engine_of(each, "hierarchy", 6) for each in tenants)
        assert one.drafter is not other.drafter
    assert tenant_of("a", "b") != tenant_of("ab", None) != tenant_of(None, "ab")
    assert tenant_of(None, None) == ""


def test_tenants_do_not_share_cached_prefixes(instance: Engine) -> None:
    with served(instance) as (client, _):

        def cached(user: str) -> int:
            result = post(client, {**SHORT, "prompt": PROMPT * 3, "user": user})
            return int(result.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

        assert [cached("ann"), cached("bob")] == [0, 0]
        assert cached("ann") > 100


def test_invalid_settings_are_refused() -> None:
    bad: dict[str, Any] = {"host": "0.0.0.0", "port": 70000, "max_batch_size": 0, "keys": [" "]}
    bad |= {"admin_key": "", "max_queue_size": -1, "max_connections": 1, "keep_alive": float("nan")}
    bad |= {"hosts": "a.org", "cors": "https://a.org"}  # a text is no list
    never = [("cors", ["a.org"]), ("cors", ["https://a.org/"]), ("hosts", ["https://a.org"])]
    for name, value in [*bad.items(), *never]:
        with pytest.raises(InputError):
            ServerSettings(**{name: value})
    assert not ServerSettings(host="0.0.0.0", keys=["k"]).local
    assert ServerSettings(host="::1").local and ServerSettings(host="localhost").local
    with ServerSettings(port=0).listen() as door:  # or each small answer waits some 40 ms
        assert door.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_texts_that_a_stop_cuts_short_get_status_503(instance: Engine) -> None:
    settings = ServerSettings(drain=0.05)
    serving = Serving(instance, NAME)
    app = build_app(serving, settings)
    with listening(app) as address, ThreadPoolExecutor(1) as other:
        body = {**LONG, "max_tokens": 450, "n": 4}
        cut = other.submit(httpx.post, f"{address}/v1/completions", json=body, timeout=60)
        until(lambda: serving.scheduler.live == 4)
        app.state.routes.stop(settings.drain)
        result = cut.result()
    assert result.status_code == 503 and result.json()["error"]["code"] == "stopping"


def test_a_second_signal_within_the_handler_stops_the_server(
    instance: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    app, drains = build_app(Serving(instance, NAME), ServerSettings()), list[float]()
    server: run.Server

    def stop(seconds: float) -> None:
        drains.append(seconds)
        if len(drains) == 1:
            server.handle_exit(signal.SIGINT, None)

    app.state.routes.stop = stop
    server = run.Server(app, ServerSettings(drain=math.inf))
    server.handle_exit(signal.SIGINT, None)
    assert drains == [math.inf, 0.0] and server.should_exit
    for text in ("ASGI callable returned without completing response.", "Traceback", "Other"):
        logging.getLogger("uvicorn.error").error(text)
    assert [each.getMessage() for each in caplog.records] == ["Other"]


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
BODY = b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
WHOLE = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + BODY, WHOLE, b"\x16\x03\x01\r\n\r\n"])
def test_idle_connections_do_not_block_other_clients(
    instance: Engine, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    settings = ServerSettings(max_connections=32, access_log=False)
    with served(instance, settings) as (client, _), ExitStack() as opened:
        lines = [opened.enter_context(connected(client)) for _ in range(100)]
        for line in lines:
            with suppress(OSError):  # closed already
                line.sendall(sent)
        with httpx.Client(base_url=client.base_url, timeout=5) as honest:
            assert post(honest, SHORT).status_code == 200
        until(lambda: sum(map(is_open, lines)) <= 16)  # half of all, as from one address
        assert len(caplog.records) < 10


def is_open(line: socket.socket) -> bool:
    """Return whether the server has not closed a connection."""
    line.setblocking(False)
    try:
        while line.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def test_late_headers_and_bodies_end_without_log_lines(
    instance: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "HEADER_SECONDS", 0.2)
    monkeypatch.setattr(access, "BODY_SECONDS", 0.2)
    caplog.set_level("INFO", "ragspec.server")
    with served(instance, ServerSettings(keep_alive=0.2)) as (client, _):
        for sent in (b"", HEAD, b"\r\n", WHOLE, WHOLE + HEAD, HEAD + BODY):
            with connected(client, sent) as line:
                while line.recv(1 << 16):
                    pass
    assert "GET" in caplog.text and "POST" not in caplog.text


def test_request_ids_hosts_and_the_log(instance: Engine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "ragspec.server")

    def ask(client: httpx.Client, host: str, name: str = "") -> httpx.Response:
        return client.get("/v1/models", headers={"host": host, "x-request-id": name})

    with served(instance) as (client, _):
        for host in ("localhost", "127.0.0.1:8000", "[::1]:80"):
            assert ask(client, host).status_code == 200
        for host in ("evil.example", "localhost.evil.example:8000", "", "[", "localhost@x"):
            assert ask(client, host).status_code == 403, host
        absolute = client.get("/", extensions={"target": b"HTTP://localhost/health"})
        assert absolute.json()["status"] == "ready"
        assert ask(client, "localhost", "mine-7").headers["x-request-id"] == "mine-7"
        until(lambda: "GET /v1/models 200" in caplog.text and "mine-7" in caplog.text)
        names = {ask(client, "localhost", bad).headers["x-request-id"] for bad in ("", "a b")}
        assert len(names) == 2 and all(len(name) == 32 for name in names)
    for settings in (ServerSettings(keys=["k"]), ServerSettings(hosts=("Evil.Example:80",))):
        quiet = replace(settings, access_log=False)
        caplog.clear()
        with served(instance, quiet) as (client, _):
            assert ask(client, "evil.example").status_code == (401 if settings.keys else 200)
            assert not caplog.records
