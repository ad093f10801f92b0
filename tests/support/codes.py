"""Tiny code-books and drafts over them, for the tests of relaxed acceptance."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind
from ragspec.visual.rules.codebook import CodeNeighbours, Codes
from tests.support.distributions import Distributions, Grow, Place, grow

Distribution = NDArray[np.float64]


def mass(p: Distribution, codes: Codes) -> float:
    return float(p[codes].cumsum()[-1]) if len(codes) else 0.0


def relaxed_distribution(p: Distribution, code: int, among: Codes) -> Distribution:
    """Return p [V] with the mass of the related codes moved to `code`."""
    distribution = p.copy()
    distribution[among] = 0.0
    distribution[code] = p[code] + mass(p, among)
    return distribution


def codebook(codes: int, width: int = 3, seed: int = 0) -> torch.Tensor:
    """Return a random code-book [V, d] whose rows have very different lengths."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(codes, width)) * rng.uniform(0.2, 5.0, size=(codes, 1))
    return torch.from_numpy(rows).float()


def neighbours(codes: int, k: int, seed: int = 0) -> CodeNeighbours:
    return CodeNeighbours.build(codebook(codes, seed=seed), k)


def likeliest(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    """Return the draft's best codes: deterministic candidates."""
    best: list[int] = q.topk(k).indices.tolist()
    return best


def with_the_targets_noise(noise: NoiseStream, place: Place, q: torch.Tensor, k: int) -> list[int]:
    scores = q.log() + noise.gumbel([place.index], torch.arange(len(q)))
    best: list[int] = scores.topk(k).indices.tolist()
    return best


def fixed(*widths: int) -> Grow:
    """Return how a tree of deterministic candidates is grown."""
    return partial(grow, widths=widths, draw=likeliest, kind=DraftKind.DETERMINISTIC)


def coupled(*widths: int) -> Grow:
    """Return how a tree of candidates with the target's noise is grown."""
    return partial(grow, widths=widths, draw=with_the_targets_noise, kind=DraftKind.COUPLED)


def sampled(*widths: int) -> Grow:
    """Return how a tree of independent draws is grown."""
    return partial(grow, widths=widths)


def distribution_after(distributions: Distributions, context: Sequence[int] = ()) -> Distribution:
    result: Distribution = distributions.target(tuple(context)).numpy()
    return result


def variation(p: Distribution, q: Distribution) -> float:
    return float(np.abs(p - q).sum() / 2)


def broken(module: ModuleType, old: str, new: str) -> ModuleType:
    """Return a module of another's source with one place changed."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text(encoding="utf-8")
    assert old in source, f"{module.__name__} no longer contains {old!r}: mend this mutant"
    instance = ModuleType(f"broken_{module.__name__.replace('.', '_')}")
    sys.modules[instance.__name__] = instance
    try:
        exec(compile(source.replace(old, new), instance.__name__, "exec"), instance.__dict__)
    finally:
        del sys.modules[instance.__name__]
    return instance


def first_distribution(rule: Rule, distributions: Distributions, tree: Grow) -> Distribution:
    """Return the exact distribution of the first code that one step emits."""
    result = np.zeros(distributions.vocab)
    for text, weight in distributions.outcomes(rule, tree).items():
        result[text[0]] += weight
    return result


def first_excess(rule: Rule, distributions: Distributions, tree: Grow, seed: int = 0) -> float:
    noise = NoiseStream(seed)
    return distributions.judge(rule, tree(distributions, noise, ()), noise).excess[0]
