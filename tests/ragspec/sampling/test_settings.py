"""Settings of the output law: ranges, seeds, and what a GenerationConfig asks for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ragspec.errors import SamplingError
from ragspec.sampling.settings import Sampling


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "1"},
        {"top_p": 0.0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"top_k": -1},
        {"top_k": 2.5},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": None},
        {"no_repeat_ngram_size": 1.0},
        {"min_new_tokens": -1},
        {"n": 0},
        {"n": 1.5},
        {"seed": "abc"},
        {"seed": 0.5},
        {"seed": [1, 2.5]},
        {"do_sample": True},
    ],
)
def test_values_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_greedy_is_temperature_nought_or_no_sampling() -> None:
    assert Sampling().greedy
    assert Sampling(temperature=0.7, do_sample=False).greedy
    assert not Sampling(temperature=0.7).greedy
    assert not Sampling(temperature=0.7, do_sample=True).greedy


def test_seeds_by_prompt() -> None:
    assert [Sampling(seed=5).seed_of(row) for row in (0, 9)] == [5, 5]
    assert [Sampling(seed=[7, 8]).seed_of(row) for row in (0, 1)] == [7, 8]
    assert Sampling().seed_of(3) is None
    with pytest.raises(SamplingError, match="2 seeds for at least 3 prompts"):
        Sampling(seed=[7, 8]).seed_of(2)


@pytest.mark.parametrize("seed", [np.int64(3), np.array([3, 4]), (3, 4), range(3, 5)])
def test_seeds_of_numpy_become_plain_integers(seed: Any) -> None:
    """They enter 64-bit arithmetic that would overflow in numpy's own integers."""
    result = Sampling(seed=seed).seed_of(0)
    assert result == 3
    assert type(result) is int


def test_settings_of_a_generation_config() -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_k=11,
        top_p=0.9,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        bad_words_ids=[[4]],
        num_return_sequences=3,
    )
    result = Sampling.from_generation_config(config, seed=5)
    assert result == Sampling(
        temperature=0.7,
        top_k=11,
        top_p=0.9,
        repetition_penalty=1.2,
        no_repeat_ngram_size=3,
        bad_words_ids=[[4]],
        n=3,
        seed=5,
    )
    greedy = Sampling.from_generation_config(GenerationConfig(do_sample=False, temperature=0.7))
    assert greedy.greedy
    assert Sampling.from_generation_config(GenerationConfig(do_sample=True)).temperature == 1.0
    with pytest.raises(SamplingError, match="num_beams=4"):
        Sampling.from_generation_config(GenerationConfig(num_beams=4))
