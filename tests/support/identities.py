"""Whether a drafter leaves the text as it is: the one check that every method must pass."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from ragspec import Engine, Sampling
from ragspec.drafters.base import Drafter, SourceText
from ragspec.rules.base import Step
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_static
from tests.support import tiny

SAMPLINGS = {"greedy": Sampling(seed=3), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=3)}
BATCHES = (1, 4)
NEW = 20
BUDGET = 12

# Parts of the prompt stand in it twice, so that there is something to copy.
_PARTS = [tiny.prompt(9, seed=seed) for seed in range(4)]
PROMPTS = [[*part, *tiny.prompt(5, seed=9), *part[: 4 + i]] for i, part in enumerate(_PARTS)]


def target() -> Any:
    """Return the tiny target in float64, where the text does not depend on rounding."""
    return tiny.model("llama", dtype=torch.float64)


@cache
def expected(settings: str, batch: int) -> list[list[int]]:
    """Return what plain decoding writes."""
    return _write(Engine(target(), drafter=None), SAMPLINGS[settings], batch, ())[0]


@cache
def answers() -> tuple[SourceText, ...]:
    """Return texts that hold most of what will be written, with an error every few tokens."""
    texts = list[SourceText]()
    for settings in SAMPLINGS:
        for tokens in expected(settings, BATCHES[-1]):
            spoiled = [(t + 1) % tiny.VOCAB if i % 6 == 5 else t for i, t in enumerate(tokens)]
            texts.append(SourceText(tuple(spoiled), document=len(texts)))
    return tuple(texts)


@cache
def opened(static: str) -> CausalTarget:
    """Return the target as it takes its steps; one for all, so that its buffers are used again."""
    return open_static(CausalTarget(target()), static)


def check_identity(
    drafter: Drafter,
    settings: str,
    batch: int,
    *,
    copies: bool = True,
    statics: Sequence[str] = ("off", "eager"),
) -> None:
    """Assert that the drafter changes no token, and, where it may copy, that it is of use.

    Both by the session that fits every step, and by steps of fixed shape.
    """
    for static in statics:
        engine = Engine(opened(static), drafter=drafter, budget=BUDGET)
        assert engine.target.static == static
        tokens, steps = _write(engine, SAMPLINGS[settings], batch, answers() if copies else ())
        assert tokens == expected(settings, batch), static
        if copies:
            assert sum(len(step.path) for step in steps) > 4 * batch


def _write(
    engine: Engine, sampling: Sampling, batch: int, texts: tuple[SourceText, ...]
) -> tuple[list[list[int]], list[Step]]:
    seeds = replace(sampling, seed=[5, 6, 7, 8][:batch])
    results = engine.generate(
        PROMPTS[:batch], seeds, max_new_tokens=NEW, ignore_eos=True, texts=texts
    )
    return [r.tokens for r in results], [step for r in results for step in r.steps]
