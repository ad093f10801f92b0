"""The law of the next token: transformers' own filters, shortcuts that equal a full sort."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling

FILTERS: dict[str, dict[str, Any]] = {
    "top-k": {"top_k": 7},
    "top-k 1": {"top_k": 1},
    "top-p": {"top_p": 0.8},
    "top-p small": {"top_p": 0.01},
    "min-p": {"min_p": 0.1},
    "top-k top-p": {"top_k": 20, "top_p": 0.6},
    "all": {"top_k": 30, "top_p": 0.9, "min_p": 0.05},
    "top-k beyond the vocabulary": {"top_k": 100_000, "top_p": 0.95},
}


def distribution(seed: int = 0, **settings: Any) -> TokenDistribution:
    return TokenDistribution(Sampling(**{"temperature": 1.0, **settings}), NoiseStream(seed))


def scores(rows: int, size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)


def warped(values: torch.Tensor, temperature: float, **filters: float) -> torch.Tensor:
    """Return transformers' law of the values: f64 [R, V]."""
    from transformers import (
        MinPLogitsWarper,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    ids = torch.zeros(len(values), 1, dtype=torch.int64)
    chain = [TemperatureLogitsWarper(temperature)]
    if "top_k" in filters:
        chain.append(TopKLogitsWarper(int(filters["top_k"])))
    if "top_p" in filters:
        chain.append(TopPLogitsWarper(filters["top_p"]))
    if "min_p" in filters:
        chain.append(MinPLogitsWarper(filters["min_p"]))
    for warper in chain:
        values = warper(ids, values)
    return values.softmax(-1)


@pytest.mark.parametrize("size", [97, 1000, 9000])
@pytest.mark.parametrize("name", FILTERS)
def test_the_filters_are_those_of_transformers(name: str, size: int) -> None:
    filters = FILTERS[name]
    for scale, temperature in ((3.0, 0.7), (0.01, 1.3)):  # peaked, and nearly flat
        values = scores(3, size, scale)
        result = distribution(temperature=temperature, **filters).probabilities(values)
        torch.testing.assert_close(result, warped(values, temperature, **filters))


def test_the_check_of_the_filters_can_fail() -> None:
    values = scores(3, 1000)
    result = distribution(top_k=7).probabilities(values)
    assert not torch.allclose(result, warped(values, 1.0, top_k=8))


@given(st.permutations(range(6)))
def test_ties_survive_together_in_any_order(order: list[int]) -> None:
    values = torch.tensor([[3.0, 2.0, 2.0, 2.0, 1.0, 0.0]])[:, order]
    options: list[dict[str, Any]] = [{"top_k": 2}, {"top_p": 0.55}]
    for filters in options:
        selected = distribution(**filters).probabilities(values)[0] > 0
        assert sorted(values[0, selected].tolist()) == [2.0, 2.0, 2.0, 3.0]


def test_ties_beyond_the_candidates_still_weigh() -> None:
    """1000 tokens tie with the fifth: top-p must weigh them all, not those that were fetched."""
    values = torch.full((1, 3000), -5.0, dtype=torch.float64)
    values[0, :1000], values[0, 7] = 0.0, float(torch.tensor(150.0).log())
    result = distribution(top_k=5, top_p=0.5).probabilities(values)[0]
    assert int((result > 0).sum()) == 1000
    assert float(result[7]) == pytest.approx(150 / 1149)


@pytest.mark.parametrize("filters", [{}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.2}])
def test_the_token_is_the_argmax_of_the_perturbed_distribution(filters: dict[str, Any]) -> None:
    values, indices = scores(6, 1000), [0, 1, 2, 50, 51, 52]
    mine = distribution(seed=4, **filters)
    noise = NoiseStream(4).gumbel_rows(indices, torch.arange(1000).expand(6, 1000))
    expected = (mine.probabilities(values).log() + noise).argmax(-1)
    assert torch.equal(mine.select(values, indices), expected)
    assert not torch.equal(mine.select(values, [i + 1 for i in indices]), expected)


@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 9}, {"top_p": 0.7}])
def test_the_best_begin_with_the_token_and_carry_their_probability(
    filters: dict[str, Any],
) -> None:
    values, indices = scores(4, 600), [3, 4, 5, 6]
    mine = distribution(seed=2, **filters)
    tokens, chances = mine.best(values, indices, 4)
    assert torch.equal(tokens[:, 0], mine.select(values, indices))
    assert all(len(set(row)) == 4 for row in tokens.tolist())
    if not mine.sampling.greedy:
        torch.testing.assert_close(chances, mine.probabilities(values).gather(-1, tokens))
    else:
        torch.testing.assert_close(chances, values.softmax(-1).gather(-1, tokens))


def test_samples_follow_the_distribution() -> None:
    values = torch.tensor([[1.0, 0.0, 2.0, -1.0, 0.5]])
    mine = distribution(seed=9, temperature=0.8, top_k=4)
    count = 20_000
    sample = mine.select(values.expand(count, -1), range(count))
    shares = torch.bincount(sample, minlength=5).double() / count
    expected = mine.probabilities(values)[0]
    assert float(shares[3]) == 0.0
    assert float((shares - expected).abs().max()) < 4 * (0.25 / count) ** 0.5


def test_greedy_takes_no_noise_and_the_first_of_a_tie() -> None:
    values = torch.tensor([[0.0, 5.0, 5.0]])
    for mine in (
        distribution(temperature=0.0),
        distribution(temperature=2.0, do_sample=False, top_k=2),
    ):
        assert [int(mine.select(values, [index])) for index in range(20)] == [1] * 20
        assert mine.probabilities(values).tolist() == [[0.0, 1.0, 0.0]]


def test_half_precision_scores_are_filtered_in_double() -> None:
    values = scores(3, 1000).to(torch.bfloat16)
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
    assert [type(p).__name__ for p in light.processors] == ["RepetitionPenalty"]
    assert TokenDistribution(Sampling(), NoiseStream(0)).trivial


@pytest.mark.parametrize("settings", [{}, {"top_k": 9}, {"temperature": 0.0}])
def test_the_order_begins_with_the_choice(settings: dict[str, Any]) -> None:
    values, chooses = scores(5, 300), distribution(**settings)
    order = chooses.order(values, range(5), 4)
    assert order.shape == (5, 4)
    assert torch.equal(order[:, 0], chooses.select(values, range(5)))
    if not settings.get("temperature", 1.0):
        assert torch.equal(order, values.topk(4).indices)
        return
    noise = chooses.noise.gumbel_rows(range(5), torch.arange(300).expand(5, -1))
    whole = chooses.probabilities(values).log() + noise
    assert torch.equal(order, whole.topk(4).indices)
