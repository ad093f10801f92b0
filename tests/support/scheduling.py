"""Requests of all kinds for engines that serve several at once."""

import random
import threading
from collections.abc import Sequence
from typing import Any

import torch

from ragspec import Engine, Sampling
from ragspec.budget.forward_cost import ForwardCost
from ragspec.budget.goodput import AutoBudget
from ragspec.drafters.base import SourceText
from ragspec.engine.handle import RequestHandle
from ragspec.verification.causal import CausalTarget
from tests.support import tiny

Requests = tuple[list[int], Sampling, dict[str, Any]]


def engine_of(target: CausalTarget, name: str, budget: int | AutoBudget = 6) -> Engine:
    drafter = None if name in ("plain", "model") else name
    draft = tiny.model("llama", seed=1, dtype=torch.float64) if name == "model" else None
    engine = Engine(target, tiny.tokenizer(), drafter=drafter, draft_model=draft, budget=budget)
    engine.cost = ForwardCost() if isinstance(budget, AutoBudget) else None
    return engine


def queries(count: int, seed: int = 0) -> list[Requests]:
    """Return requests of all kinds; some prompts begin alike."""
    rng = random.Random(seed)
    parts = [tiny.prompt(rng.randrange(5, 30), seed=number) for number in range(4)]
    results = []
    for number in range(count):
        prompt = [*rng.choice(parts), *rng.choice(parts)[: rng.randrange(4)], *rng.choice(parts)]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.9]),
            seed=number,
            repetition_penalty=rng.choice([None, 1.2]),
        )
        options: dict[str, Any] = {
            "max_new_tokens": rng.randrange(1, 24),
            "stop": rng.choice([(), ("e",)]),
            "logprobs": rng.choice([None, 2]),
        }
        if rng.random() < 0.3:
            options["texts"] = [SourceText(tuple(rng.choice(parts)))]
        if rng.random() < 0.3:
            options["prediction"] = rng.choice(parts)
        results.append((prompt, sampling, options))
    return results


def alone(engine: Engine, requests: Sequence[Requests]) -> list[list[int]]:
    return [engine.generate(prompt, s, **options).tokens for prompt, s, options in requests]


def submit(pool: Engine, requests: Sequence[Requests], **more: Any) -> list[RequestHandle]:
    return [pool.submit(prompt, s, **options, **more) for prompt, s, options in requests]


def tokens_of(handle: RequestHandle) -> list[int]:
    return [token for step in handle for token in step.tokens]


def close(pool: Engine) -> None:
    """Close a pool, which must not take long."""
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


REQUESTS = queries(12)
