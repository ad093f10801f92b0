"""The overhead of the server over the engine, and its behaviour under load, on one machine.

    OMP_NUM_THREADS=1 python benchmarks/server.py [--model starter] [--only stream,overload,
        disconnects,prediction,half-open,soak] [--requests 2000] [--json FILE]

- stream: one client against `Engine.stream` in the process of the server, interleaved; milliseconds
  to the first text and a token
- overload: 64 clients at once, a batch of 8, a queue of 8
- disconnects: clients that disconnect at random tokens; time until their slot is free
- prediction: tokens a forward with a `prediction` of the right text
- half-open: 1,200 sockets each that send nothing, half a header, or no body; seconds of an honest
  caller at once and after the deadlines, and lines of the log
- soak: requests of all kinds, one in ten cancelled; memory, threads, files and the 99th percentile
  of seconds, of the first 200 requests and the last

All parts but stream run the server in a separate process.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import uvicorn

from ragspec.engine.engine import Engine
from ragspec.pipelines.server.app import build_app
from ragspec.pipelines.server.serving import Serving
from ragspec.pipelines.server.settings import ServerSettings

PROMPTS = (
    "Speculative decoding is",
    "A draft tree holds several continuations, and the target reads",
    "The walk over the tree begins at its root and",
    "Documents are cut into passages; for a question the best of them",
)
SOCKETS, DEADLINES = 1200, 35.0  # seconds, after which half-open ones are closed
PARTS = ("stream", "overload", "disconnects", "prediction", "half-open", "soak")


def main() -> None:
    """Print the figures of each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--requests", type=int, default=2000, help="requests of the soak")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of stream and disconnects")
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    measures: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "stream": stream,
        "overload": overload,
        "disconnects": disconnects,
        "prediction": prediction,
        "half-open": half_open,
        "soak": soak,
    }
    figures: dict[str, Any] = {}
    for part in inputs.only.split(","):
        figures[part] = measures[part](inputs)
        print(part, json.dumps(figures[part]), flush=True)
        if inputs.json is not None:
            inputs.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def body(model: str, number: int, tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request body; `number` picks the prompt and the sampling."""
    sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    prompt = PROMPTS[number % len(PROMPTS)]
    return (
        {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        | sampled
        | more
    )


@contextmanager
def running(model: str, *options: str) -> Iterator[tuple[httpx.Client, subprocess.Popen[str]]]:
    """Start a server in a subprocess; yield a client and the process."""
    command = [sys.executable, "-m", "ragspec", "serve", "--model", model, "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        line = server.stderr.readline()
        while line and "http://" not in line:
            line = server.stderr.readline()
        address = line.split()[2].rstrip(",")
        with httpx.Client(base_url=address, timeout=300, limits=httpx.Limits()) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.1)
            yield client, server
    finally:
        server.terminate()
        server.wait(30)


# --- one client -------------------------------------------------------------------------------


def stream(inputs: argparse.Namespace) -> dict[str, Any]:
    """Compare a client's stream with the engine's, interleaved."""
    engine = Engine.from_pretrained(inputs.model, "context", budget=8, dtype="float32")
    serving = Serving(engine, inputs.model, default=("context", 8))
    server = uvicorn.Server(
        uvicorn.Config(build_app(serving, ServerSettings()), port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    direct: list[tuple[float, float]] = []
    served: list[tuple[float, float]] = []
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(inputs.rounds + 2):
            prompt = f"{number} {PROMPTS[number % len(PROMPTS)]}"
            request = body(inputs.model, 0, 64, prompt=prompt, drafter="context", budget=8)
            pairs = [
                (direct, lambda p=prompt: _stream_engine(engine, p)),
                (served, lambda a=request: _stream_server(client, a)),
            ]
            for times, run in pairs if number % 2 else pairs[::-1]:
                times.append(run())
    server.should_exit = True
    thread.join()
    first, each = ([[row[at] for row in rows[2:]] for rows in (direct, served)] for at in (0, 1))
    return {
        "first_ms": [round(1000 * statistics.median(rows), 2) for rows in first],
        "first_more_ms": round(1000 * _difference(*first), 2),
        "token_ms": [round(1000 * statistics.median(rows), 3) for rows in each],
        "token_ratio": round(statistics.median(b / a for a, b in zip(*each, strict=True)), 3),
    }


def _difference(direct: list[float], served: list[float]) -> float:
    return statistics.median(b - a for a, b in zip(direct, served, strict=True))


def _stream_engine(engine: Engine, prompt: str) -> tuple[float, float]:
    """Return seconds to the first text and of a token after it."""
    began = time.perf_counter()
    chunks = engine.stream(prompt, max_new_tokens=64, ignore_eos=True)
    next(chunks)
    first = time.perf_counter()
    for _ in chunks:
        pass
    return first - began, (time.perf_counter() - first) / 63


def _stream_server(client: httpx.Client, request: dict[str, Any]) -> tuple[float, float]:
    """Return seconds to the first text and of a token after it, over HTTP."""
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter()
    return first - began, (time.perf_counter() - first) / 63


# --- many clients -----------------------------------------------------------------------------


def overload(inputs: argparse.Namespace) -> dict[str, Any]:
    """Send requests of 64 clients at once to a server with room for 16."""
    with running(inputs.model, "-s", "max-batch-size=8", "-s", "max-queue-size=8") as (client, _):
        client.post("/v1/completions", json=body(inputs.model, 0, 4))
        with ThreadPoolExecutor(64) as clients:
            responses = list(
                clients.map(
                    lambda number: _timed(client, body(inputs.model, number, 96)), range(64)
                )
            )
    refused = [seconds for status, seconds in responses if status == 429]
    return {
        "statuses": _counts([status for status, _ in responses]),
        "refused_ms_median": round(1000 * statistics.median(refused), 1),
        "refused_ms_most": round(1000 * max(refused), 1),
    }


def _timed(client: httpx.Client, request: dict[str, Any]) -> tuple[int, float]:
    began = time.perf_counter()
    status = client.post("/v1/completions", json=request).status_code
    return status, time.perf_counter() - began


def _counts(statuses: list[int]) -> dict[str, int]:
    return {str(value): statuses.count(value) for value in sorted(set(statuses))}


def disconnects(inputs: argparse.Namespace) -> dict[str, Any]:
    """Disconnect at random tokens; return the time until the slot is free."""
    rng, waits = random.Random(5), []
    with running(inputs.model, "-s", "max-batch-size=4") as (client, _):
        for number in range(inputs.rounds * 5 // 2):
            request = body(inputs.model, number, 400, stream=True)
            with client.stream("POST", "/v1/completions", json=request) as response:
                lines = response.iter_lines()
                for _ in range(rng.randint(1, 40)):
                    next(lines, None)
            closed = time.perf_counter()
            while client.get("/health").json()["live"]:
                time.sleep(0.002)
            waits.append(time.perf_counter() - closed)
    waits.sort()
    return {
        "disconnects": len(waits),
        "slot_free_ms_median": round(1000 * statistics.median(waits), 1),
        "slot_free_ms_most": round(1000 * waits[-1], 1),
    }


def prediction(inputs: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a forward with a prediction of the right text and without."""
    with running(inputs.model) as (client, _):
        rates: dict[str, list[float]] = {"none": [], "right": []}
        for number in range(8):
            request = body(inputs.model, number, 96)
            request["seed"] = number
            plain = client.post("/v1/completions", json=request).json()
            text = plain["choices"][0]["text"]
            content = {"type": "content", "content": text}
            predicted = client.post(
                "/v1/completions", json={**request, "prediction": content}
            ).json()
            assert predicted["choices"][0]["text"] == text
            for name, each in (("none", plain), ("right", predicted)):
                forwards = each["metrics"]["speculative_decoding"]["num_forwards"]
                rates[name].append(each["usage"]["completion_tokens"] / forwards)
    return {name: round(statistics.median(values), 2) for name, values in rates.items()}


def half_open(inputs: argparse.Namespace) -> dict[str, Any]:
    """Open sockets that never end their requests, and ask beside them."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * SOCKETS, 2 * SOCKETS))
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
    kinds = {"no byte": b"", "half a header": head, "no body": head + b"Content-Length: 9\r\n\r\n"}
    figures: dict[str, Any] = {}
    for kind, data in kinds.items():
        with running(inputs.model) as (client, server), ExitStack() as opened:
            request, address = (
                body(inputs.model, 0, 1),
                (client.base_url.host, client.base_url.port),
            )
            for _ in range(SOCKETS):
                opened.enter_context(socket.create_connection(address)).sendall(data)
            seconds = []
            for wait in (0.0, DEADLINES):
                time.sleep(wait)
                for _ in range(5):  # each over a connection of its own
                    with httpx.Client(base_url=client.base_url, timeout=60) as caller:
                        status, spent = _timed(caller, request)
                        assert status == 200
                        seconds.append(spent)
        assert server.stderr is not None
        figures[kind] = {"most_seconds": round(max(seconds), 2), "lines": len([*server.stderr])}
    return figures


# --- a long run -------------------------------------------------------------------------------


def soak(inputs: argparse.Namespace) -> dict[str, Any]:
    """Send requests for a long time; return the growth of memory, threads and files."""
    with running(inputs.model, "-s", "max-batch-size=8", "-s", "max-queue-size=32") as (
        client,
        process,
    ):
        rows: list[dict[str, float]] = []
        block = 200
        for start in range(0, inputs.requests, block):
            numbers = range(start, min(start + block, inputs.requests))
            with ThreadPoolExecutor(8) as clients:
                times = sorted(
                    clients.map(lambda number: _mixed(client, inputs.model, number), numbers)
                )
            rows.append({"p99": times[int(0.99 * (len(times) - 1))], **_size(process.pid)})
            print(f"  {numbers.stop} requests: {rows[-1]}", flush=True)
    first, last = rows[0], rows[-1]
    return {
        "requests": inputs.requests,
        "memory_mb": [round(first["memory"]), round(last["memory"])],
        "threads": [first["threads"], last["threads"]],
        "files": [first["files"], last["files"]],
        "p99_ratio": round(last["p99"] / first["p99"], 3),
    }


def _mixed(client: httpx.Client, model: str, number: int) -> float:
    """Send one request of a kind that `number` picks; return its seconds."""
    request = body(model, number, 8 + number % 25, user=f"user-{number % 5}")
    began = time.perf_counter()
    if number % 10 == 3:
        with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
            next(response.iter_lines())
    elif number % 10 == 7:
        assert client.post("/v1/completions", json={**request, "n": 99}).status_code == 400
    else:
        response = client.post("/v1/completions", json={**request, "n": 1 + number % 2})
        assert response.status_code == 200, response.text
    return time.perf_counter() - began


def _size(process: int) -> dict[str, float]:
    """Return megabytes, threads and open files of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    lines = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    return {
        "memory": int(lines["VmRSS"].split()[0]) / 1000,
        "threads": int(lines["Threads"]),
        "files": len(os.listdir(f"/proc/{process}/fd")),
    }


if __name__ == "__main__":
    main()
