"""Concurrent callers against one at a time: equal tokens, throughput, waiting times, memory.

    python benchmarks/scheduler.py [--small] [--model starter] [--parts equal,rate,guide]

- equal: requests join, end and are cancelled at random times, greedy and sampled, with every
  drafter. Each must have the tokens of the same request alone.
- rate: tokens a second of eight clients against one. A client sends its next request after the last
  answer. Free text (sampled, 96 tokens after 128) and questions over the bundled guide (short
  answers after 400 tokens, prefill included), plain and with `context`; medians of interleaved
  repeats.
- gap: longest wait between two steps of seven requests while a prompt of 1,500 tokens joins. It is
  compared with their median step and the time of one prefill chunk.
- guide: tokens a second of eight requests at once over the same guide of 400 tokens, 48 each.
- again: time to the first token of a second question over the same documents, against the first.
- memory: bytes of keys and values while one prompt is decoded, against those of its own tokens.

The script exits with 1 if a token differs.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragspec.engine.engine import Engine
from ragspec.engine.handle import RequestHandle
from ragspec.engine.scheduler import CHUNK
from ragspec.models.load import load_model
from ragspec.pipelines.bench.prompts import DOCQA, BenchItem, bundled_items
from ragspec.sampling.settings import Sampling
from ragspec.verification.sequence_cache import slot_bytes

DRAFTERS = ("plain", "context", "auto", "recycling", "suffix", "draft model")
LONG, CLIENTS, NEW = 1500, 8, 96


@dataclass(frozen=True)
class TextRequest:
    """The arguments of one request to `generate` and `submit`."""

    prompt: list[int]
    sampling: Sampling
    options: dict[str, Any]


def random_requests(items: Sequence[BenchItem], count: int, seed: int) -> list[TextRequest]:
    """Return random requests over the first tokens of the items' prompts."""
    rng = random.Random(seed)
    batch = []
    for number in range(count):
        item = rng.choice(items)
        prompt = list(item.prompt)[: rng.randrange(8, 400)]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.7, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            repetition_penalty=rng.choice([None, None, 1.2]),
            seed=number,
        )
        options = {"max_new_tokens": rng.randrange(1, 48), "stop": rng.choice([(), (".",)])}
        batch.append(TextRequest(prompt, sampling, options))
    return batch


def count_differences(engine: Engine, requests: Sequence[TextRequest], seed: int) -> int:
    """Return the number of requests with other tokens together than alone."""
    rng = random.Random(seed)
    alone = [engine.generate(a.prompt, a.sampling, **a.options).tokens for a in requests]
    wrong = 0
    with engine.with_limits(CLIENTS, chunk=64) as pool:
        handles = []
        for each in requests:
            tenant = rng.choice(["one", "two"])
            handles.append(pool.submit(each.prompt, each.sampling, tenant=tenant, **each.options))
            time.sleep(rng.expovariate(20.0))
            if rng.random() < 0.2:
                rng.choice(handles).cancel()
        for handle, expected in zip(handles, alone, strict=True):
            tokens = handle.result().tokens
            is_prefix = tokens == expected[: len(tokens)]
            wrong += not (tokens == expected or (handle.cancelled and is_prefix))
    return wrong


def throughput(pool: Engine, requests: Sequence[TextRequest], clients: int) -> float:
    """Return the tokens a second of `clients` clients with one request each at a time."""
    left, tokens, lock = list(requests), [0], threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                if not left:
                    return
                each = left.pop(0)
            generation = pool.submit(each.prompt, each.sampling, **each.options).result()
            with lock:
                tokens[0] += len(generation.tokens)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens[0] / (time.perf_counter() - began)


def rate(
    engine: Engine, requests: Sequence[TextRequest], repeats: int
) -> tuple[float, float, float]:
    """Return tokens a second of one client and of eight, and the median of their ratios."""
    ones: list[float] = []
    eights: list[float] = []
    for _ in range(repeats):
        for clients, into in ((1, ones), (CLIENTS, eights)):
            with engine.with_limits(CLIENTS) as pool:
                into.append(throughput(pool, requests, clients))
    ratios = [eight / one for one, eight in zip(ones, eights, strict=True)]
    return statistics.median(ones), statistics.median(eights), statistics.median(ratios)


def gap(engine: Engine, prompts: Sequence[list[int]], long: list[int]) -> tuple[float, ...]:
    """Return milliseconds: longest wait, median step, one chunk, and time to the first token."""
    stamps: list[list[float]] = [[] for _ in prompts[: CLIENTS - 1]]

    def record_times(times: list[float]) -> Callable[[int, Any], None]:
        return lambda number, step: times.append(time.perf_counter())

    def start(pool: Engine) -> list[RequestHandle]:
        return [
            pool.submit(prompt, max_new_tokens=400, ignore_eos=True, on_step=record_times(times))
            for prompt, times in zip(prompts, stamps, strict=False)
        ]

    with engine.with_limits(CLIENTS) as pool:
        handles = start(pool)
        while min(map(len, stamps)) < 12:
            time.sleep(0.01)
        before = [len(times) for times in stamps]
        handle = pool.submit(long, max_new_tokens=4)
        handle.result()
        for each in handles:
            each.cancel()
    steps = [b - a for times, n in zip(stamps, before, strict=True) for a, b in pairs(times[2:n])]
    waits = [
        b - a
        for times, n in zip(stamps, before, strict=True)
        for a, b in pairs(times[n - 1 :])
        if a < handle.first
    ]
    step, first = statistics.median(steps), handle.first - handle.submitted
    return 1000 * max(waits), 1000 * step, 1000 * chunk_seconds(engine, long), 1000 * first


def pairs(times: Sequence[float]) -> list[tuple[float, float]]:
    """Return pairs of consecutive times."""
    return list(itertools.pairwise(times))


def chunk_seconds(engine: Engine, long: list[int]) -> float:
    """Return the least seconds of three prefills of the last chunk of a long prompt."""
    from ragspec.trees.draft_tree import DraftTree

    empty, times = [DraftTree.empty()], []
    for _ in range(3):
        with engine.target.open(1, len(long)) as session, torch.no_grad():
            session.verify([long[:-CHUNK]], empty)
            session.commit([()])
            began = time.perf_counter()
            session.verify([long[-CHUNK:]], empty)
            times.append(time.perf_counter() - began)
    return min(times)


def again(engine: Engine, documents: list[int], questions: Sequence[list[int]]) -> float:
    """Return the median ratio of the times to the first token, second question by first."""
    ratios = []
    for first, second in itertools.pairwise(questions):
        with engine.with_limits(CLIENTS) as pool:
            times = []
            for question in (first, second):
                handle = pool.submit([*documents, *question], max_new_tokens=8)
                handle.result()
                times.append(handle.first - handle.submitted)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def guide(engine: Engine, beginning: list[int], questions: Sequence[list[int]]) -> float:
    """Return the tokens a second of requests at once that begin alike."""
    with engine.with_limits(CLIENTS) as pool:
        began = time.perf_counter()
        handles = [
            pool.submit([*beginning, *question], max_new_tokens=48, ignore_eos=True)
            for question in questions
        ]
        tokens = sum(len(handle.result().tokens) for handle in handles)
        return tokens / (time.perf_counter() - began)


def memory(engine: Engine, prompt: list[int]) -> tuple[int, int]:
    """Return the most bytes of keys and values while a prompt is decoded, and those needed."""
    sizes: list[int] = []
    pool = engine.with_limits(CLIENTS)

    def note(number: int, step: Any) -> None:
        if pool.scheduler.session is not None:
            sizes.append(sum(each.bytes for each in pool.scheduler.session.caches.values()))

    pool.generate(prompt, max_new_tokens=8, ignore_eos=True, on_step=note)
    config, dtype = engine.model.config, engine.target.dtype
    return max(sizes), (len(prompt) + 8) * slot_bytes(config, dtype)


def engine_of(name: str, model: Any, tokenizer: Any) -> Engine:
    """Return the engine for one of `DRAFTERS`."""
    if name == "draft model":
        return Engine(model, tokenizer, drafter=None, draft_model=load_model("starter-draft"))
    return Engine(model, tokenizer, drafter=None if name == "plain" else name)


@dataclass(frozen=True)
class Bench:
    """The model and prompts of all parts; `scale` divides the work."""

    model: Any
    tokenizer: Any
    questions: Sequence[BenchItem]
    free: Sequence[BenchItem]
    scale: int

    @property
    def text(self) -> list[int]:
        """The tokens of all prompts."""
        return [token for item in (*self.questions, *self.free) for token in item.prompt]

    def engine(self, name: str) -> Engine:
        """Return the engine of one of `DRAFTERS`."""
        return engine_of(name, self.model, self.tokenizer)


def show_equal(bench: Bench) -> int:
    """Print how many requests have the same tokens as alone; return how many have not."""
    wrong = 0
    for name in DRAFTERS:
        requests = random_requests([*bench.questions, *bench.free], 200 // bench.scale, 0)
        differences = count_differences(bench.engine(name), requests, 1)
        wrong += differences
        print(
            f"equal   {name}: {len(requests) - differences} of {len(requests)} texts as alone",
            flush=True,
        )
    return wrong


def show_rate(bench: Bench, repeats: int) -> None:
    """Print tokens a second of one client and of eight, on free text and on questions."""
    most = max(CLIENTS, 32 // bench.scale)
    sampled = [
        TextRequest(
            list(item.prompt),
            Sampling(temperature=0.8, seed=seed),
            {"max_new_tokens": NEW, "ignore_eos": True},
        )
        for seed in range(most)
        for item in bench.free
    ][:most]
    questions = [
        TextRequest(list(item.prompt), Sampling(), {"max_new_tokens": NEW})
        for item in bench.questions[
            :most
        ]  # each once, since the prefix cache would skip a second prefill
    ]
    for label, requests in (("free text", sampled), ("questions", questions)):
        for name in ("plain", "context"):
            figures = rate(bench.engine(name), requests, repeats)
            numbers = "{:.0f} tokens/s of one client, {:.0f} of eight, {:.2f}x".format(*figures)
            print(f"rate    {label}, {name}: {numbers}", flush=True)


def show_gap(bench: Bench) -> None:
    """Print the waits of requests that a long prompt joins."""
    prompts = [bench.text[start : start + 60] for start in range(0, 600, 60)]
    for name in ("plain", "context"):
        figures = gap(bench.engine(name), prompts, bench.text[-LONG:])
        numbers = "longest {:.0f} ms, median step {:.1f} ms, a chunk {:.0f} ms".format(*figures)
        print(f"gap     {name}: {numbers}; first token after {figures[3]:.0f} ms", flush=True)


def show_guide(bench: Bench, repeats: int) -> None:
    """Print the tokens a second of eight requests over one guide."""
    questions = [list(item.prompt)[-20:] for item in bench.questions[:CLIENTS]]
    for name in ("plain", "context"):
        engine = bench.engine(name)
        figures = [guide(engine, bench.text[:400], questions) for _ in range(repeats)]
        print(f"guide   {name}: {statistics.median(figures):.0f} tokens/s", flush=True)


def show_memory(bench: Bench) -> None:
    """Print the memory of one long prompt."""
    used, needed = memory(bench.engine("plain"), bench.text[:LONG])
    print(
        f"memory  {used / 1e6:.1f} MB for {needed / 1e6:.1f} MB: {used / needed:.2f}x", flush=True
    )


def show_again(bench: Bench) -> None:
    """Print the cost of a second question over the same documents."""
    questions = [list(item.prompt)[-20:] for item in bench.questions[: 12 // min(bench.scale, 3)]]
    ratio = again(bench.engine("plain"), bench.text[: LONG // 2], questions)
    print(f"again   {ratio:.2f} of the first question's time to the first token", flush=True)


def main() -> int:
    """Measure and print; return 1 if a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--small", action="store_true", help="do a tenth of the work")
    parser.add_argument("--parts", default="equal,rate,guide,gap,again,memory")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    parts = options.parts.split(",")
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    items = bundled_items(Engine(model, tokenizer, drafter=None))
    questions = [item for item in items if item.category == DOCQA]
    free = [item for item in items if item.category != DOCQA]
    bench = Bench(model, tokenizer, questions, free, 10 if options.small else 1)
    wrong = show_equal(bench) if "equal" in parts else 0
    if "rate" in parts:
        show_rate(bench, 1 if options.small else options.repeats)
    if "gap" in parts:
        show_gap(bench)
    if "guide" in parts:
        show_guide(bench, options.repeats)
    if "again" in parts:
        show_again(bench)
    if "memory" in parts:
        show_memory(bench)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
