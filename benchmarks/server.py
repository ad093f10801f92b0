"""What the server adds to the engine, and what it withstands, on this machine alone.

    OMP_NUM_THREADS=1 python benchmarks/server.py [--model starter] [--only stream,surplus,leaving,
        prediction,soak] [--requests 2000] [--json FILE]

stream: a request of one client against `Engine.stream` in the same process as the server's model,
in turns: milliseconds to the first piece and a token. surplus: 64 clients at once, 8 slots, a queue
of 8. leaving: callers that leave at random tokens; how long their row stays. prediction: tokens a
forward with the right text predicted. soak: requests of all kinds, one in ten left early; memory,
threads, files and the 99th percentile of seconds, of the first 200 and the last. The server is a
process of its own but for stream.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
PARTS = ("stream", "surplus", "leaving", "prediction", "soak")


def main() -> None:
    """Print the figures of each part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--requests", type=int, default=2000, help="of the soak")
    parser.add_argument("--rounds", type=int, default=40, help="of stream and leaving")
    parser.add_argument("--json", type=Path)
    inputs = parser.parse_args()
    torch.set_num_threads(1)
    measures: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "stream": stream,
        "surplus": surplus,
        "leaving": leaving,
        "prediction": prediction,
        "soak": soak,
    }
    record: dict[str, Any] = {}
    for part in inputs.only.split(","):
        record[part] = measures[part](inputs)
        print(part, json.dumps(record[part]), flush=True)
        if inputs.json is not None:
            inputs.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def body(model: str, number: int, tokens: int, **more: Any) -> dict[str, Any]:
    """Return a request; the number picks the prompt and how it is sampled."""
    sampled = {"temperature": 0.8, "seed": number} if number % 2 else {"temperature": 0}
    prompt = PROMPTS[number % len(PROMPTS)]
    return (
        {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        | sampled
        | more
    )


@contextmanager
def running(model: str, *options: str) -> Iterator[tuple[httpx.Client, int]]:
    """Start a server as a user does; yield a client and the process."""
    command = [sys.executable, "-m", "ragspec", "serve", "--model", model, "--port", "0", *options]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    try:
        address = server.stderr.readline().split()[2].rstrip(",")
        with httpx.Client(base_url=address, timeout=300, limits=httpx.Limits()) as client:
            while client.get("/health").status_code != 200:
                time.sleep(0.1)
            yield client, server.pid
    finally:
        server.terminate()
        server.wait(30)


# --- one client -------------------------------------------------------------------------------


def stream(inputs: argparse.Namespace) -> dict[str, Any]:
    """Compare a client's stream with the engine's own, in turns."""
    engine = Engine.from_pretrained(inputs.model, "context", budget=8)
    serving = Serving(engine, inputs.model)
    serving.drafting._default = ("context", 8)
    server = uvicorn.Server(
        uvicorn.Config(build_app(serving, ServerSettings()), port=0, log_level="error")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    current, served = [], []
    with httpx.Client(base_url=address, timeout=60) as client:
        for number in range(inputs.rounds + 2):
            prompt = f"{number} {PROMPTS[number % len(PROMPTS)]}"
            request = body(inputs.model, 0, 64, prompt=prompt, drafter="context", budget=8)
            pairs = [
                (current, lambda p=prompt: _local(engine, p)),
                (served, lambda a=request: _served(client, a)),
            ]
            for times, run in pairs if number % 2 else pairs[::-1]:
                times.append(run())
    server.should_exit = True
    thread.join()
    first, each = ([[row[at] for row in rows[2:]] for rows in (current, served)] for at in (0, 1))
    return {
        "first_ms": [round(1000 * statistics.median(rows), 2) for rows in first],
        "first_more_ms": round(1000 * _difference(*first), 2),
        "token_ms": [round(1000 * statistics.median(rows), 3) for rows in each],
        "token_ratio": round(statistics.median(b / a for a, b in zip(*each, strict=True)), 3),
    }


def _difference(current: list[float], served: list[float]) -> float:
    return statistics.median(b - a for a, b in zip(current, served, strict=True))


def _local(engine: Engine, prompt: str) -> tuple[float, float]:
    """Return seconds to the first piece and of a token after it."""
    began = time.perf_counter()
    chunks = engine.stream(prompt, max_new_tokens=64, ignore_eos=True)
    next(chunks)
    first = time.perf_counter()
    for _ in chunks:
        pass
    return first - began, (time.perf_counter() - first) / 63


def _served(client: httpx.Client, request: dict[str, Any]) -> tuple[float, float]:
    """Return the same of a stream of the server."""
    began, first = time.perf_counter(), 0.0
    with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {") and not first:
                first = time.perf_counter()
    return first - began, (time.perf_counter() - first) / 63


# --- many clients -----------------------------------------------------------------------------


def surplus(inputs: argparse.Namespace) -> dict[str, Any]:
    """Ask with 64 clients at once where 16 find room."""
    with running(inputs.model, "--max-batch-size", "8", "--max-queue-size", "8") as (client, _):
        client.post("/v1/completions", json=body(inputs.model, 0, 4))
        with ThreadPoolExecutor(64) as clients:
            requests = list(
                clients.map(
                    lambda number: _timed(client, body(inputs.model, number, 96)), range(64)
                )
            )
    refused = [seconds for status, seconds in requests if status == 429]
    return {
        "statuses": _counts([status for status, _ in requests]),
        "refused_ms_median": round(1000 * statistics.median(refused), 1),
        "refused_ms_most": round(1000 * max(refused), 1),
    }


def _timed(client: httpx.Client, request: dict[str, Any]) -> tuple[int, float]:
    began = time.perf_counter()
    status = client.post("/v1/completions", json=request).status_code
    return status, time.perf_counter() - began


def _counts(result: list[int]) -> dict[str, int]:
    return {str(value): result.count(value) for value in sorted(set(result))}


def leaving(inputs: argparse.Namespace) -> dict[str, Any]:
    """Leave streams at random tokens; tell how long their row stays."""
    dice, stays = random.Random(5), []
    with running(inputs.model, "--max-batch-size", "4") as (client, _):
        for number in range(inputs.rounds * 5 // 2):
            request = body(inputs.model, number, 400, stream=True)
            with client.stream("POST", "/v1/completions", json=request) as response:
                lines = response.iter_lines()
                for _ in range(dice.randint(1, 40)):
                    next(lines, None)
            left = time.perf_counter()
            while client.get("/health").json()["live"]:
                time.sleep(0.002)
            stays.append(time.perf_counter() - left)
    stays.sort()
    return {
        "left": len(stays),
        "row_stays_ms_median": round(1000 * statistics.median(stays), 1),
        "row_stays_ms_most": round(1000 * stays[-1], 1),
    }


def prediction(inputs: argparse.Namespace) -> dict[str, Any]:
    """Predict the right text; tell tokens a forward with and without."""
    with running(inputs.model) as (client, _):
        rates: dict[str, list[float]] = {"none": [], "right": []}
        for number in range(8):
            request = body(inputs.model, number, 96)
            request["seed"] = number
            plain = client.post("/v1/completions", json=request).json()
            text = plain["choices"][0]["text"]
            record = {"type": "content", "content": text}
            result = client.post("/v1/completions", json={**request, "prediction": record}).json()
            assert result["choices"][0]["text"] == text
            for name, each in (("none", plain), ("right", result)):
                forwards = each["metrics"]["speculative_decoding"]["num_forwards"]
                rates[name].append(each["usage"]["completion_tokens"] / forwards)
    return {name: round(statistics.median(values), 2) for name, values in rates.items()}


# --- a long run -------------------------------------------------------------------------------


def soak(inputs: argparse.Namespace) -> dict[str, Any]:
    """Ask for a long time; tell what has grown."""
    with running(inputs.model, "--max-batch-size", "8", "--max-queue-size", "32") as (
        client,
        process,
    ):
        rows: list[dict[str, float]] = []
        block = 200
        for start in range(0, inputs.requests, block):
            numbers = range(start, min(start + block, inputs.requests))
            with ThreadPoolExecutor(8) as clients:
                took = sorted(
                    clients.map(lambda number: _mixed(client, inputs.model, number), numbers)
                )
            rows.append({"p99": took[int(0.99 * (len(took) - 1))], **_size(process)})
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
    """Do one request of the many kinds; return its seconds."""
    request = body(model, number, 8 + number % 25, user=f"user-{number % 5}")
    began = time.perf_counter()
    if number % 10 == 3:
        with client.stream("POST", "/v1/completions", json={**request, "stream": True}) as response:
            next(response.iter_lines())
    elif number % 10 == 7:
        assert client.post("/v1/completions", json={**request, "n": 99}).status_code == 400
    else:
        result = client.post("/v1/completions", json={**request, "n": 1 + number % 2})
        assert result.status_code == 200, result.text
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
