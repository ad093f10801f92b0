"""The distribution of the next token against the filters of transformers."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling


def distribution(seed: int = 0, **settings: Any) -> TokenDistribution:
    return TokenDistribution(Sampling(**{"temperature": 1.0, **settings}), NoiseStream(seed))


def theirs(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """Return the distributions [R, V] of transformers' warpers, in the order of `generate`."""
    warpers = logits_process.LogitsProcessorList(
        [logits_process.TemperatureLogitsWarper(float(sampling.temperature))]
    )
    if sampling.top_k:
        warpers.append(logits_process.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1.0:
        warpers.append(logits_process.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p:
        warpers.append(logits_process.MinPLogitsWarper(sampling.min_p))
    distributions: torch.Tensor = warpers(torch.zeros(len(scores), 1, dtype=torch.int64), scores)
    return distributions.softmax(-1)


def logits(rows: int, size: int, spread: float, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(rows, size, generator=generator, dtype=torch.float64)


@given(st.permutations(range(6)))
def test_ties_survive_together_in_any_order(order: list[int]) -> None:
    values = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 0.0]])[:, order]
    options: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.55}]
    for filters in options:
        selected = distribution(**filters).probabilities(values)[0] > 0
        assert sorted(values[0, selected].tolist()) == [2.0, 2.0, 2.0, 3.0]


def test_ties_beyond_the_candidates_count_in_top_p() -> None:
    """1000 tokens tie with the fifth: top-p counts them all, not the candidates alone."""
    values = torch.full((1, 3000), -5.0, dtype=torch.float64)
    values[0, :1000], values[0, 7] = 0.0, float(torch.tensor(150.0).log())
    result = distribution(top_k=5, top_p=0.5).probabilities(values)[0]
    assert int((result > 0).sum()) == 1000
    assert float(result[7]) == pytest.approx(150 / 1149)


def test_greedy_ignores_noise_and_takes_the_first_of_equal_scores() -> None:
    values = torch.tensor([[0.0, 5.0, 5.0]])
    for mine in (
        distribution(temperature=0.0),
        distribution(temperature=2.0, do_sample=False, top_k=2),
    ):
        assert [int(mine.select(values, [index])) for index in range(20)] == [1] * 20
        assert mine.probabilities(values).tolist() == [[0.0, 1.0, 0.0]]


def test_half_precision_scores_are_filtered_in_double() -> None:
    values = logits(3, 1000, 3.0, seed=0).to(torch.bfloat16)
    mine = distribution(seed=1, top_p=0.9)
    assert torch.equal(mine.select(values, [0, 1, 2]), mine.select(values.double(), [0, 1, 2]))


def test_forbidden_tokens_are_never_sampled() -> None:
    values = torch.full((1, 1000), float("-inf"))
    values[0, [3, 700]] = torch.tensor([0.0, 1.0])
    for filters in ({}, {"top_k": 50}, {"top_p": 0.99}, {"top_k": 50, "top_p": 0.99}):
        sample = distribution(**filters).select(values.expand(200, -1), range(200))
        assert set(sample.tolist()) == {3, 700}


def test_drafters_get_the_distribution_without_processors_that_may_keep_state() -> None:
    sampling = Sampling(temperature=1.0, repetition_penalty=1.2, no_repeat_ngram_size=2)
    mine = TokenDistribution(sampling, NoiseStream(0), 3)
    assert mine.lazy
    assert not mine.trivial
    light = mine.without_lazy()
    assert not light.lazy
    assert [type(p).__name__ for p in light.processors] == ["Penalties"]
    assert TokenDistribution(Sampling(), NoiseStream(0)).trivial


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.6),
    Sampling(temperature=1.7, top_k=5),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=0.9, min_p=0.1),
    Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.05),
]


@given(
    temperature=st.floats(0.3, 2.0),
    top_k=st.sampled_from([0, 1, 5, 50, 500, 100_000]),
    top_p=st.sampled_from([1.0, 0.95, 0.7, 0.2, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
    size=st.sampled_from([7, 300, 3000, 9000]),
    spread=st.sampled_from([0.01, 0.1, 1.0, 4.0]),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=120)
def test_probabilities_are_those_of_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, size: int, spread: float, seed: int
) -> None:
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    scores = logits(3, size, spread, seed)
    ours = TokenDistribution(sampling, NoiseStream(0)).probabilities(scores)
    assert torch.allclose(ours, theirs(scores, sampling), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sampling", SETTINGS)
def test_a_row_among_others_gets_the_token_that_it_gets_alone(sampling: Sampling) -> None:
    scores = logits(16, 1500, 2.0, seed=5)
    distribution = TokenDistribution(sampling, NoiseStream(9))
    together = distribution.select(scores, range(16))
    alone = [int(distribution.select(scores[row : row + 1], [row])) for row in range(16)]
    assert together.tolist() == alone


@pytest.mark.parametrize("sampling", [Sampling(), *SETTINGS])
def test_filters_do_not_change_which_survivor_is_sampled(sampling: Sampling) -> None:
    """The token is the best of log p + g over the vocabulary."""
    scores, noise, indices = logits(8, 1500, 2.0, seed=6), NoiseStream(2), [0, 1, 2, *range(50, 55)]
    distribution = TokenDistribution(sampling, noise)
    whole = scores
    if not sampling.greedy:
        noises = noise.gumbel(indices, torch.arange(1500).expand(8, -1))
        whole = distribution.probabilities(scores).log() + noises
    expected, places = whole.topk(4)
    tokens, best = distribution.best(scores, indices, 4)
    left = expected.isfinite()  # a filter may leave fewer than four
    assert torch.equal(tokens[left], places[left])
    torch.testing.assert_close((best - best[:, :1])[left], (expected - expected[:, :1])[left])
    assert torch.equal(distribution.select(scores, indices), places[:, 0])
    moved = distribution.select(scores, [i + 1 for i in indices])
    assert torch.equal(moved, places[:, 0]) is sampling.greedy
