"""The token law against transformers' own processors: equal probabilities, and draws from them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling

SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.9, min_p=0.1),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
]


def theirs(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the laws [R, V] of transformers' warpers, in the order of its `generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(sampling.temperature))])
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    distributions: torch.Tensor = warpers(torch.zeros(len(scores), 1, dtype=torch.int64), scores)
    return distributions.softmax(-1)


def logits(rows: int, size: int, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)


@given(
    temperature=st.floats(0.3, 2.0),
    top_k=st.sampled_from([0, 1, 5, 50, 500]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.2]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    size=st.sampled_from([7, 300, 3000]),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=80)
def test_probabilities_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, size: int, spread: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = logits(3, size, spread, seed)
    ours = TokenDistribution(sampling, NoiseStream(0)).probabilities(scores)
    assert torch.allclose(ours, theirs(scores, sampling), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [12, 1500])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_tokens_are_sampled_from_these_probabilities(sampling: Sampling, size: int) -> None:
    rows, seeds = 400, 6
    scores = logits(1, size, 2.0, seed=3)
    distribution = theirs(scores, sampling)[0].numpy()
    sample = np.concatenate(
        [
            TokenDistribution(sampling, NoiseStream(seed)).select(
                scores.expand(rows, -1), range(rows)
            )
            for seed in range(seeds)
        ]
    )
    counts, expected = np.bincount(sample, minlength=size), distribution * len(sample)
    assert counts[distribution == 0.0].sum() == 0
    common = expected >= 5  # rarer tokens are counted together
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(expected[common], expected[~common].sum())
    observed, expected = observed[expected > 0], expected[expected > 0]
    freedom = len(expected) - 1
    chi = float(((observed - expected) ** 2 / expected).sum())
    assert chi < freedom + 6 * math.sqrt(2 * freedom) + 6


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_row_is_sampled_alike_alone_and_among_others(sampling: Sampling) -> None:
    scores, distribution = (
        logits(16, 1500, 2.0, seed=5),
        TokenDistribution(sampling, NoiseStream(9)),
    )
    together = distribution.select(scores, range(16))
    alone = [int(distribution.select(scores[row : row + 1], [row])) for row in range(16)]
    assert together.tolist() == alone


@pytest.mark.parametrize("sampling", SETTINGS)
def test_filters_do_not_change_which_survivor_is_sampled(sampling: Sampling) -> None:
    # The noise belongs to the token: the draw is the best of log p + g over the whole vocabulary.
    scores, noise = logits(8, 1500, 2.0, seed=6), NoiseStream(2)
    distribution = TokenDistribution(sampling, noise)
    whole = noise.gumbel_rows(range(8), torch.arange(1500).expand(8, -1))
    best = (distribution.probabilities(scores).log() + whole).argmax(-1)
    assert distribution.select(scores, range(8)).tolist() == best.tolist()
    tokens, probabilities = distribution.best(scores, range(8), 3)
    assert tokens[:, 0].tolist() == best.tolist()
    assert torch.allclose(
        probabilities, distribution.probabilities(scores).gather(-1, tokens), rtol=1e-9, atol=1e-12
    )


def test_greedy_takes_the_mode() -> None:
    scores = logits(5, 300, 1.0, seed=1)
    distribution = TokenDistribution(Sampling(), NoiseStream(0))
    assert distribution.select(scores, range(5)).tolist() == scores.argmax(-1).tolist()
    assert distribution.probabilities(scores).argmax(-1).tolist() == scores.argmax(-1).tolist()
    assert distribution.probabilities(scores).amax(-1).tolist() == [1.0] * 5
