"""The similarity of two pictures: peak signal-to-noise ratio, and equality of latents."""

from __future__ import annotations

from math import inf, log10
from typing import Any

import numpy as np
import torch

TOLERANCE = 1e-3  # of numbers of latents, since rounding differs by batch size


def psnr(first: Any, second: Any) -> float:
    """Return the peak signal-to-noise ratio of two pictures of 0 to 255 in dB; inf if equal.

    Args:
        first, second: Arrays of one shape.
    """
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    error = float(np.square(difference).mean())
    return 10.0 * log10(255.0**2 / error) if error else inf


def same_latents(first: torch.Tensor, second: torch.Tensor) -> list[bool]:
    """Return for each picture whether its latents [B, h, w, D] are equal up to rounding."""
    difference = (first - second).abs().flatten(1).amax(1)
    return list(map(bool, difference < TOLERANCE))
