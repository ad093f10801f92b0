"""A pool beside one caller at a time: the same tokens, how many a second, and who waits how long.

    python benchmarks/pool.py [--small] [--model starter] [--parts equal,rate,gap,again]

equal: requests that join, leave and are cancelled at random times, greedy and sampled, under every
drafter; each must have the tokens that it has alone. rate: tokens a second of eight clients against
one, who each ask their next question when they have the last answer: free text (sampled, 96 tokens
after 128) and the questions of the bundled guide (short answers after 400 tokens, the reading of
which counts), by plain decoding and with `context`; medians of interleaved repeats. gap: the
longest wait between two steps of seven texts while a prompt of 1,500 tokens joins them, against
their median step and the time of one chunk. again: the time to the first token of a second question
over the same documents against that of the first. Exits with 1 where a token differs.
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
from ragspec.engine.pool import CHUNK, Pool
from ragspec.models.load import load_model
from ragspec.pipelines.bench.prompts import DOCQA, BenchItem, bundled_items
from ragspec.sampling.settings import Sampling

DRAFTERS = ("plain", "context", "auto", "recycling", "suffix", "draft model")
LONG, CLIENTS, NEW = 1500, 8, 96


@dataclass(frozen=True)
class Requests:
    """One request: what `generate` and `submit` take."""

    prompt: list[int]
    sampling: Sampling
    options: dict[str, Any]


def requests(items: Sequence[BenchItem], count: int, seed: int) -> list[Requests]:
    """Return random requests over the prompts of the items, or parts of them."""
    rng = random.Random(seed)
    results = []
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
        results.append(Requests(prompt, sampling, options))
    return results


def differing(engine: Engine, request: Sequence[Requests], seed: int) -> int:
    """Return how many of the requests get other tokens in a pool than alone."""
    rng = random.Random(seed)
    alone = [engine.generate(a.prompt, a.sampling, **a.options).tokens for a in request]
    wrong = 0
    with Pool(engine, max_batch_size=CLIENTS, chunk=64) as pool:
        handles = []
        for each in request:
            tenant = rng.choice(["one", "two"])
            handles.append(pool.submit(each.prompt, each.sampling, tenant=tenant, **each.options))
            time.sleep(rng.expovariate(20.0))
            if rng.random() < 0.2:
                rng.choice(handles).cancel()
        for handle, expected in zip(handles, alone, strict=True):
            result = handle.result().tokens
            whole = result == expected
            wrong += not (whole or (handle.cancelled and result == expected[: len(result)]))
    return wrong


def served(pool: Pool, request: Sequence[Requests], clients: int) -> float:
    """Return the tokens a second of so many clients that ask in turn."""
    left, tokens, lock = list(request), [0], threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                if not left:
                    return
                each = left.pop(0)
            result = pool.submit(each.prompt, each.sampling, **each.options).result()
            with lock:
                tokens[0] += len(result.tokens)

    threads = [threading.Thread(target=ask) for _ in range(clients)]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tokens[0] / (time.perf_counter() - began)


def rate(engine: Engine, request: Sequence[Requests], repeats: int) -> tuple[float, float, float]:
    """Return tokens a second of one client and of eight, and the median of their ratios."""
    ones, eights = [], []
    for _ in range(repeats):
        for clients, into in ((1, ones), (CLIENTS, eights)):
            with Pool(engine, max_batch_size=CLIENTS) as pool:
                into.append(served(pool, request, clients))
    ratios = [eight / one for one, eight in zip(ones, eights, strict=True)]
    return statistics.median(ones), statistics.median(eights), statistics.median(ratios)


def gap(engine: Engine, prompts: Sequence[list[int]], long: list[int]) -> tuple[float, ...]:
    """Return milliseconds: longest wait, median step, one chunk, and time to the first token."""
    stamps: list[list[float]] = [[] for _ in prompts[: CLIENTS - 1]]

    def note(current: list[float]) -> Callable[[Any], None]:
        return lambda step: current.append(time.perf_counter())

    def live(pool: Pool) -> list[RequestHandle]:
        return [
            pool.submit(prompt, max_new_tokens=400, ignore_eos=True, on_step=note(current))
            for prompt, current in zip(prompts, stamps, strict=False)
        ]

    with Pool(engine, max_batch_size=CLIENTS) as pool:
        handles = live(pool)
        while min(map(len, stamps)) < 12:
            time.sleep(0.01)
        before = [len(current) for current in stamps]
        handle = pool.submit(long, max_new_tokens=4)
        handle.result()
        for each in handles:
            each.cancel()
    steps = [
        b - a for current, n in zip(stamps, before, strict=True) for a, b in pairs(current[2:n])
    ]
    waits = [
        b - a
        for current, n in zip(stamps, before, strict=True)
        for a, b in pairs(current[n - 1 :])
        if a < handle.first
    ]
    step, first = statistics.median(steps), handle.first - handle.submitted
    return 1000 * max(waits), 1000 * step, 1000 * chunk_seconds(engine, long), 1000 * first


def pairs(times: Sequence[float]) -> list[tuple[float, float]]:
    """Return each time with the next."""
    return list(itertools.pairwise(times))


def chunk_seconds(engine: Engine, long: list[int]) -> float:
    """Return the seconds of reading the last chunk of a long prompt: the least of three."""
    from ragspec.trees.draft_tree import DraftTree

    empty, results = [DraftTree.empty()], []
    for _ in range(3):
        with engine.target.open(1, len(long)) as session, torch.no_grad():
            session.verify([long[:-CHUNK]], empty)
            session.commit([()])
            began = time.perf_counter()
            session.verify([long[-CHUNK:]], empty)
            results.append(time.perf_counter() - began)
    return min(results)


def again(engine: Engine, documents: list[int], questions: Sequence[list[int]]) -> float:
    """Return the second question's time to its first token by that of the first: the median."""
    ratios = []
    for first, second in itertools.pairwise(questions):
        with Pool(engine, max_batch_size=CLIENTS) as pool:
            times = []
            for question in (first, second):
                handle = pool.submit([*documents, *question], max_new_tokens=8)
                handle.result()
                times.append(handle.first - handle.submitted)
        ratios.append(times[1] / times[0])
    return statistics.median(ratios)


def engine_of(name: str, model: Any, tokenizer: Any) -> Engine:
    """Return the engine for one of `DRAFTERS`."""
    if name == "draft model":
        return Engine(model, tokenizer, drafter=None, draft_model=load_model("starter-draft"))
    return Engine(model, tokenizer, drafter=None if name == "plain" else name)


@dataclass(frozen=True)
class DraftState:
    """What all parts measure with."""

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


def show_equal(draft_state: DraftState) -> int:
    """Print which texts are those that each request has alone; return how many are not."""
    wrong = 0
    for name in DRAFTERS:
        request = requests([*draft_state.questions, *draft_state.free], 200 // draft_state.scale, 0)
        current = differing(draft_state.engine(name), request, 1)
        wrong += current
        print(
            f"equal   {name}: {len(request) - current} of {len(request)} texts as alone", flush=True
        )
    return wrong


def show_rate(draft_state: DraftState, repeats: int) -> None:
    """Print tokens a second of one client and of eight, on free text and on questions."""
    most = max(CLIENTS, 32 // draft_state.scale)
    sampled = [
        Requests(
            list(item.prompt),
            Sampling(temperature=0.8, seed=seed),
            {"max_new_tokens": NEW, "ignore_eos": True},
        )
        for seed in range(most)
        for item in draft_state.free
    ][:most]
    asking = [
        Requests(list(item.prompt), Sampling(), {"max_new_tokens": NEW})
        for item in draft_state.questions[:most]  # each once: what was read is not read again
    ]
    for what, request in (("free text", sampled), ("questions", asking)):
        for name in ("plain", "context"):
            result = rate(draft_state.engine(name), request, repeats)
            numbers = "{:.0f} tokens/s of one client, {:.0f} of eight, {:.2f}x".format(*result)
            print(f"rate    {what}, {name}: {numbers}", flush=True)


def show_gap(draft_state: DraftState) -> None:
    """Print what a long prompt costs the texts that it joins."""
    prompts = [draft_state.text[start : start + 60] for start in range(0, 600, 60)]
    for name in ("plain", "context"):
        result = gap(draft_state.engine(name), prompts, draft_state.text[-LONG:])
        numbers = "longest {:.0f} ms, median step {:.1f} ms, a chunk {:.0f} ms".format(*result)
        print(f"gap     {name}: {numbers}; first token after {result[3]:.0f} ms", flush=True)


def show_again(draft_state: DraftState) -> None:
    """Print what a second question over the same documents costs."""
    asks = [
        list(item.prompt)[-20:] for item in draft_state.questions[: 12 // min(draft_state.scale, 3)]
    ]
    ratio = again(draft_state.engine("plain"), draft_state.text[: LONG // 2], asks)
    print(f"again   {ratio:.2f} of the first question's time to the first token", flush=True)


def main() -> int:
    """Measure and print; returns 1 where a token differs."""
    parser = argparse.ArgumentParser(description="Measure a pool beside one caller at a time.")
    parser.add_argument("--model", default="starter")
    parser.add_argument("--small", action="store_true", help="a tenth of the work")
    parser.add_argument("--parts", default="equal,rate,gap,again")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    parts = options.parts.split(",")
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model)
    items = bundled_items(Engine(model, tokenizer, drafter=None))
    questions = [item for item in items if item.category == DOCQA]
    free = [item for item in items if item.category != DOCQA]
    draft_state = DraftState(model, tokenizer, questions, free, 10 if options.small else 1)
    wrong = show_equal(draft_state) if "equal" in parts else 0
    if "rate" in parts:
        show_rate(draft_state, 1 if options.small else options.repeats)
    if "gap" in parts:
        show_gap(draft_state)
    if "again" in parts:
        show_again(draft_state)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
