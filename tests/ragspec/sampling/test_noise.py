"""Noise, and the ranges, seeds and generation configs of sampling settings."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GenerationConfig

from ragspec.errors import SamplingError
from ragspec.sampling.noise import NoiseStream, NoiseUse, exponential_of_keys
from ragspec.sampling.noise import _mix as mix  # compared with published output
from ragspec.sampling.settings import Sampling, fresh_seed

GOLDEN = 0x9E3779B97F4A7C15
COUNT = 4096


def excess(observed: Sequence[int] | np.ndarray, expected: np.ndarray) -> float:
    """Return how many standard deviations chi-square lies above its mean."""
    cells = np.asarray(observed, dtype=float).ravel()
    chi = float(((cells - expected.ravel()) ** 2 / expected.ravel()).sum())
    freedom = cells.size - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


def uniforms(seed: int = 0, sample: int = 0, stream: NoiseUse = NoiseUse.ACCEPT) -> np.ndarray:
    noise = NoiseStream(seed, sample)
    return np.array([noise.uniform(index, stream) for index in range(COUNT)])


def assert_unrelated(first: np.ndarray, second: np.ndarray) -> None:
    """Assert that pairs fill the square evenly (8 x 8 cells, six standard deviations)."""
    counts, _, _ = np.histogram2d(first, second, bins=8, range=[[0, 1], [0, 1]])
    assert abs(excess(counts, np.full(64, len(first) / 64))) < 6


def test_noise_of_neighbours_seeds_samples_and_streams_is_unrelated() -> None:
    base, noise = uniforms(), NoiseStream(1)
    streams = (NoiseUse.TARGET, NoiseUse.DRAFT, NoiseUse.RESIDUAL)
    for other in (uniforms(seed=1), uniforms(sample=1), *(uniforms(stream=s) for s in streams)):
        assert_unrelated(base, other)
    assert_unrelated(uniforms(seed=1), uniforms(sample=1))
    for values in (
        base,
        [noise.uniform(9, NoiseUse.ACCEPT, lane) for lane in range(COUNT)],
        [NoiseStream(seed).uniform(0, NoiseUse.TARGET) for seed in range(COUNT)],
        [NoiseStream(5, sample).uniform(0, NoiseUse.TARGET) for sample in range(COUNT)],
    ):
        assert_unrelated(np.array(values[:-1]), np.array(values[1:]))


@given(
    seed=st.integers(-(2**70), 2**70),
    sample=st.integers(0, 10**6),
    index=st.integers(0, 2**40),
    token=st.integers(0, 2**63 - 1),
    stream=st.sampled_from(list(NoiseUse)),
)
def test_noise_of_tensors_equals_that_of_integers(
    seed: int, sample: int, index: int, token: int, stream: NoiseUse
) -> None:
    noise = NoiseStream(seed, sample)
    number = noise.uniform(index, stream, lane=token)
    assert 0.0 < number < 1.0
    gumbel = float(noise.gumbel([index], torch.tensor([token]), stream)[0])
    assert math.isfinite(gumbel)
    assert gumbel == pytest.approx(-math.log(-math.log(number)), rel=1e-9, abs=1e-9)


def test_words_are_those_of_splitmix64() -> None:
    first_five = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert [mix(1234567 + step * GOLDEN) for step in range(1, 6)] == first_five


def test_noise_depends_on_seed_sample_index_and_token_alone() -> None:
    noise = NoiseStream(11, 3)
    tokens = torch.tensor([[4, 9], [2, 4]])
    whole = noise.gumbel([6], tokens)
    assert whole.dtype == torch.float64
    assert whole.shape == tokens.shape
    assert torch.equal(whole[1:], noise.gumbel([6], tokens[1:]))
    assert whole[0, 0] == whole[1, 1]
    noise.uniform(6, NoiseUse.TARGET)
    assert torch.equal(whole, NoiseStream(11, 3).gumbel([6], tokens.to(torch.int32)))


def test_fresh_seeds_differ() -> None:
    seeds = {fresh_seed() for _ in range(8)}
    assert len(seeds) > 1
    assert all(0 <= seed < 2**31 for seed in seeds)


@pytest.mark.gpu
def test_devices_agree() -> None:
    device = torch.accelerator.current_accelerator()
    tokens = torch.arange(50_000)
    here, there = (NoiseStream(1).gumbel([3], where) for where in (tokens, tokens.to(device)))
    assert torch.allclose(here, there.cpu(), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(200_000,), (3, 5), (2, 2, 2)])
def test_noise_of_the_host_equals_that_of_devices(shape: tuple[int, ...]) -> None:
    tokens = torch.randint(1 << 40, shape, generator=torch.Generator().manual_seed(2))
    indices = [5, 17, 2**40][: 1 if len(shape) != 2 else shape[0]]
    keys = NoiseStream(3).keys(torch.tensor(indices))
    there = -exponential_of_keys(keys[:, None] if len(shape) == 2 else keys, tokens)
    here = NoiseStream(3).gumbel(indices, tokens)
    torch.testing.assert_close(there, here, atol=1e-12, rtol=1e-12)


def test_normal_numbers_are_normal_and_unrelated() -> None:
    lanes = torch.arange(COUNT).expand(2, -1)
    sample = NoiseStream(3).normal([0, 1], lanes)
    for row in sample:
        assert abs(float(row.mean())) < 6 / COUNT**0.5
        assert abs(float(row.square().mean()) - 1.0) < 6 * (2 / COUNT) ** 0.5
        assert abs(float(row.pow(4).mean()) - 3.0) < 6 * (96 / COUNT) ** 0.5
    assert abs(float((sample[0] * sample[1]).mean())) < 6 / COUNT**0.5
    assert torch.equal(NoiseStream(3).normal([1], lanes[:1, :7])[0], sample[1, :7])
    other = NoiseStream(3).normal([1], lanes[:1], NoiseUse.RESIDUAL)
    assert abs(float((other[0] * sample[1]).mean())) < 6 / COUNT**0.5


WRONG: dict[str, tuple[Any, ...]] = {
    "temperature": (-0.1, 1e-31, float("nan"), "1", True),
    "top_p": (0.0, 1.1),
    "min_p": (-0.1,),
    "top_k": (-1, 2.5),
    "repetition_penalty": (0.0,),
    "frequency_penalty": (None,),
    "no_repeat_ngram_size": (1.0,),
    "min_new_tokens": (-1,),
    "n": (0, 1.5),
    "do_sample": (True, "", ()),
    "defaults": ({"top_k": 5}, 5),
}


@pytest.mark.parametrize("wrong", [{name: v} for name, values in WRONG.items() for v in values])
def test_values_outside_their_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SamplingError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_temperature_0_and_do_sample_false_are_greedy() -> None:
    assert Sampling().greedy
    for false in (False, 0, np.False_, torch.tensor(False)):
        assert Sampling(temperature=0.7, do_sample=false).greedy  # type: ignore[arg-type]
    assert not Sampling(temperature=0.7).greedy
    assert not Sampling(temperature=0.7, do_sample=True).greedy


def test_seeds_by_prompt_are_plain_integers() -> None:
    """Integers of NumPy would overflow in the 64-bit arithmetic of noise."""
    seeds: list[Any] = [np.int64(3), np.array([3, 4]), (3, 4), [3, 4], range(3, 5)]
    for seed in seeds:
        result = [Sampling(seed=seed).seed_of(row) for row in (0, 1)]
        assert result == ([3, 3] if seed is seeds[0] else [3, 4]) and type(result[0]) is int
    assert Sampling().seed_of(3) is None


def test_settings_of_a_generation_config() -> None:
    fields: dict[str, Any] = {"temperature": 0.7, "top_k": 11, "top_p": 0.9}
    fields |= {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "bad_words_ids": [[4]]}
    config = GenerationConfig(do_sample=True, num_return_sequences=3, **fields)
    assert Sampling.from_generation_config(config, seed=5) == Sampling(n=3, seed=5, **fields)
    greedy = Sampling.from_generation_config(GenerationConfig(do_sample=False, temperature=0.7))
    assert greedy.greedy
