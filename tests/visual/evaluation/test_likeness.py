"""Signal-to-noise ratios of pictures, and latents that are the same but for rounding."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest
import torch

from ragspec.visual.evaluation.likeness import SAME, psnr, same_latents


def test_the_ratio_follows_the_error() -> None:
    ground = np.zeros((4, 4, 3), np.uint8)
    assert psnr(ground, ground) == inf
    assert psnr(ground, ground + 255) == 0.0
    assert psnr(ground + 1, ground) == pytest.approx(48.13, abs=0.01)


def test_latents_are_the_same_but_for_rounding() -> None:
    one = torch.zeros(3, 2, 2, 4)
    other = one.clone()
    other[1, 0, 0, 0], other[2, 1, 1, 3] = SAME / 2, 2 * SAME
    assert same_latents(one, other) == [True, True, False]
