"""The denoising steps, the mask and the guidance of MAR against plain ones."""

import math

import numpy as np
import pytest
import torch

from ragspec.visual.masked.schedule import LearnedSchedule, guidance_at, masked_counts
from tests.support import plain_mar


@pytest.mark.parametrize("steps", [2, 3, 10, 37, 100, 1000])
def test_steps_are_those_of_a_plain_prefill(steps: int) -> None:
    schedule = LearnedSchedule(steps)
    times, selected = plain_mar.respaced(steps)
    assert schedule.times == times and times[0] == 0 and times[-1] == 999
    dice = np.random.default_rng(0)
    for step in range(steps):
        noisy, noise = dice.normal(size=(2, 4))
        where = dice.uniform(-1, 1, 4)
        mean, log_variance = plain_mar.posterior(selected, step, noisy, noise, where)
        inputs = torch.from_numpy(noisy)
        clean = schedule.clean(step + 1, inputs, torch.from_numpy(noise))
        assert np.allclose(schedule.mean(step + 1, inputs, clean), mean, rtol=1e-9, atol=1e-9)
        message = schedule.log_variance(step + 1, torch.from_numpy(where))
        assert np.allclose(message, log_variance, atol=1e-9)


@pytest.mark.parametrize(
    ("places", "iterations"), [(9, 1), (9, 9), (64, 20), (256, 64), (256, 255), (256, 256)]
)
def test_the_mask_is_the_published_cosine(places: int, iterations: int) -> None:
    left, expected = places, []
    for done in range(1, iterations + 1):
        left = max(1, min(left - 1, int(places * math.cos(math.pi / 2 * done / iterations))))
        expected.append(left)
    expected[-1] = 0  # the last one draws all that is left
    result = masked_counts(places, iterations)
    assert result == expected
    assert all(np.diff([places, *result]) < 0)  # of 256 iterations each draws one latent


def test_guidance_rises_linearly_with_what_is_sampled() -> None:
    for left in range(257):
        expected = 1 + (2.9 - 1) * (256 - max(left, 1)) / 256
        assert guidance_at(2.9, 256, left) == pytest.approx(expected, abs=1e-12)
    assert guidance_at(1.0, 256, 3) == 1.0
