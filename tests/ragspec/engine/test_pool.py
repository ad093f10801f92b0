"""A pool: texts that join, leave and are cancelled at any time are those that each has alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.engine.pool import Pool
from ragspec.engine.ticket import Ticket
from ragspec.sampling.settings import Sampling
from tests.support import tiny


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama", dtype=torch.float64)


@pytest.fixture(scope="module", params=["plain", "context", "recycling", "model", "auto"])
def engine(request: pytest.FixtureRequest, model: Any) -> Engine:
    drafter = {"plain": None, "model": None}.get(request.param, request.param)
    draft = tiny.model("llama", seed=1, dtype=torch.float64) if request.param == "model" else None
    return Engine(model, tiny.tokenizer(), drafter=drafter, draft_model=draft, budget=6)


Asked = tuple[list[int], Sampling, dict[str, Any]]


def asked(count: int, seed: int = 0) -> list[Asked]:
    """Return requests of all kinds; some prompts begin alike."""
    rng = random.Random(seed)
    parts = [tiny.prompt(rng.randrange(5, 30), seed=number) for number in range(4)]
    found = []
    for number in range(count):
        prompt = [*rng.choice(parts), *rng.choice(parts)[: rng.randrange(4)], *rng.choice(parts)]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.9]),
            seed=number,
            repetition_penalty=rng.choice([None, 1.2]),
        )
        options = {"max_new_tokens": rng.randrange(1, 24), "stop": rng.choice([(), ("e",)])}
        found.append((prompt, sampling, options))
    return found


def alone(engine: Engine, requests: list[Asked]) -> list[list[int]]:
    return [engine.generate(prompt, s, **options).tokens for prompt, s, options in requests]


def tokens_of(ticket: Ticket) -> list[int]:
    return [token for emission in ticket for token in emission.step.tokens]


@pytest.fixture
def pool(engine: Engine) -> Iterator[Pool]:
    with Pool(engine, slots=3, chunk=16) as made:
        yield made


def test_the_tokens_are_those_of_each_request_alone(engine: Engine, pool: Pool) -> None:
    requests = asked(14)
    tickets = [pool.submit(prompt, s, **options) for prompt, s, options in requests]
    texts = [tokens_of(ticket) for ticket in tickets]
    assert texts == alone(engine, requests)
    assert [ticket.result().tokens for ticket in tickets] == texts
