"""`ragspec serve`: the server starts, reports when it is ready, and stops gracefully."""

import json
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import httpx
import pytest

REQUESTS = {"model": "tiny", "prompt": "The library", "max_tokens": 200, "ignore_eos": True}


def start_only(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return it and its address once it listens."""
    command = [sys.executable, "-m", "ragspec", "serve", "-s", "name=tiny", "--port", "0"]
    server = subprocess.Popen(
        [*command, *options],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job may ignore it
    )
    assert server.stderr is not None
    assert server.stderr.readline() == "starting ...\n"  # before torch is imported
    return server, server.stderr.readline().split()[2].rstrip(",")


def start(*options: str) -> tuple[subprocess.Popen[str], str]:
    """Start a server; return it and its address once it is ready."""
    server, address = start_only(*options)
    end = time.monotonic() + 120
    while httpx.get(f"{address}/health", timeout=60).status_code != 200:
        assert server.poll() is None and time.monotonic() < end
        time.sleep(0.1)
    return server, address


def test_running_requests_finish_before_the_server_stops(tmp_path: Path) -> None:
    (tmp_path / "rules.txt").write_text("A draft is a guess at the next tokens of a text.")
    server, address = start("--docs", str(tmp_path), "--key", "alpha")
    results: list[httpx.Response] = []
    send = partial(httpx.post, headers={"Authorization": "Bearer alpha"}, timeout=60)
    try:
        messages = [{"role": "user", "content": "What is a draft of tokens?"}]
        chat = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 40}
        message = send(f"{address}/v1/chat/completions", json=chat).json()
        assert "guess at the next tokens" in message["choices"][0]["message"]["content"]
        assert message["choices"][0]["message"]["annotations"][0]["document"] == "rules.txt"
        completed = partial(send, f"{address}/v1/completions", json=REQUESTS)
        thread = threading.Thread(target=lambda: results.append(completed()))
        thread.start()
        while not httpx.get(f"{address}/health", timeout=60).json()["live"]:
            time.sleep(0.005)
        server.send_signal(signal.SIGTERM)
        thread.join()
        server.wait(30)
    finally:
        server.kill()
    assert results[0].status_code == 200
    assert results[0].json()["usage"]["completion_tokens"] == 200
    assert server.returncode in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


@pytest.mark.parametrize("ready", [False, True])
def test_errors_are_json_and_a_second_interrupt_is_quiet(ready: bool) -> None:
    server, address = start() if ready else start_only()
    try:
        result = httpx.post(
            f"{address}/v1/completions", json=REQUESTS | {"model": "other"}, timeout=60
        )
        assert result.status_code in (503, 404) and json.loads(result.text)["error"]["code"]
        for _ in range(3):
            server.send_signal(signal.SIGINT)
            time.sleep(0.2)
        assert server.wait(40) == 130
        assert server.stderr is not None and "Traceback" not in server.stderr.read()
    finally:
        server.kill()
