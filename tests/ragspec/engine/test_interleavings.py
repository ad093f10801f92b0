"""Random interleavings of requests, steps and faults: texts equal those of requests alone."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ragspec import Engine, Sampling
from ragspec.engine.handle import RequestHandle
from ragspec.errors import CallbackError
from ragspec.verification.causal import CausalTarget
from tests.support import scheduling, tiny
from tests.support.calls import failing

TEXTS = 10
CASES = 60  # 700 for each drafter with --slow


@dataclass
class Case:
    """A request, and whether it may fail."""

    number: int
    handle: RequestHandle
    fails: bool = False


@pytest.fixture(scope="module", params=["context", "auto", None])
def engine(request: pytest.FixtureRequest) -> Engine:
    model = tiny.model("llama", dtype=torch.float64, num_hidden_layers=1)
    return Engine(model, tiny.tokenizer(), request.param, budget=5).with_limits(3, chunk=8)


@dataclass(frozen=True)
class Query:
    prompt: list[int]
    sampling: Sampling
    options: dict[str, Any]
    tokens: list[int]
    text: str


@pytest.fixture(scope="module")
def queries(engine: Engine) -> list[Query]:
    plain = Engine(engine.target, engine.tokenizer, None)
    plain.prefix_cache.max_bytes = 0
    return [
        Query(prompt, sampling, options, whole.tokens, whole.text)
        for prompt, sampling, options in scheduling.queries(TEXTS, seed=1)
        for whole in [plain.generate(prompt, sampling, **options)]
    ]


class Run:
    """One interleaving over one engine, by a seed."""

    def __init__(self, engine: Engine, queries: list[Query], seed: int) -> None:
        self.engine = engine.with_limits(3, None, 8)
        self.queries, self.rng = queries, random.Random(seed)
        self.owner = object()
        self.cases: list[Case] = []
        self.memory = self.rng.random() < 0.3
        if self.rng.random() < 0.3:
            self.engine.prefix_cache.max_bytes = 20_000

    def add(self, number: int, parts: tuple[int, ...] = ()) -> None:
        query, rng = self.queries[number], self.rng
        options: dict[str, Any] = dict(query.options)
        fails = rng.random() < 0.15
        if parts:
            options["resume_from"] = list(parts)
        if rng.random() < 0.3:
            options["stop_after"] = rng.randrange(1, 5)
        if fails:
            first = rng.randrange(3) + 1
            error = rng.choice([ValueError, SystemExit, KeyError])("not today")
            options["on_step"] = failing(error, range(first, 99))
        options["tenant"] = rng.choice(["", "one"])
        (request,), _ = self.engine.prepare(query.prompt, query.sampling, options)  # type: ignore[arg-type]
        self.cases.append(Case(number, self.engine.add(request, self.owner), fails))

    def settle(self) -> None:
        """Check the texts that have ended, and resume those that paused."""
        for case in [case for case in self.cases if case.handle.done]:
            self.cases.remove(case)
            query = self.queries[case.number]
            if (error := case.handle.future.exception()) is not None:
                if not case.fails:
                    raise error
                assert isinstance(error, ValueError | KeyError | CallbackError)
                continue
            result = case.handle.future.result()
            assert result.tokens == query.tokens[: len(result.tokens)]
            if result.finish_reason == "paused":
                self.add(case.number, tuple(result.tokens))
            elif result.finish_reason != "cancelled":
                assert result.tokens == query.tokens and result.text == query.text

    def go(self) -> None:
        for _ in range(self.rng.randrange(2, 6)):
            self.add(self.rng.randrange(TEXTS))
        for _ in range(60):
            chance = self.rng.random()
            if chance < 0.7:
                self.engine.step()
            elif chance < 0.8:
                self.add(self.rng.randrange(TEXTS))
            elif chance < 0.87 and self.cases:
                self.rng.choice(self.cases).handle.cancel()
            elif chance < 0.9 and self.cases:
                self.rng.choice(self.cases).handle.close()
            self.settle()
        while self.cases:
            self.engine.step()
            self.settle()
        assert self.engine.scheduler.open_requests == 0
        assert self.engine.scheduler.session is None


def test_texts_are_those_alone_in_any_interleaving(
    engine: Engine,
    queries: list[Query],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """Some forwards fail or lack memory."""
    true, faults = CausalTarget.forward, random.Random(7)
    errors = [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("an accident")]
    may_fail = [False]

    def forward(self: CausalTarget, tokens: Any, batch: Any, keep: Any) -> Any:
        logits = true(self, tokens, batch, keep)
        if may_fail[0] and len(batch.rows) > 1 and faults.random() < 0.1:
            raise faults.choice(errors)
        return logits

    monkeypatch.setattr(CausalTarget, "forward", forward)
    slow = request.config.getoption("--slow")
    for seed in range(700 if slow else CASES):
        run = Run(engine, queries, seed)
        may_fail[0] = run.memory
        run.go()
