"""How like two pictures are: the peak signal-to-noise ratio, and whether latents are the same."""

from __future__ import annotations

from math import inf, log10
from typing import Any

import numpy as np
import torch

SAME = 1e-3  # numbers of latents that differ by less are the same: rounding differs by width


def psnr(first: Any, second: Any) -> float:
    """Return the peak signal-to-noise ratio of two pictures of 0 to 255, in dB; inf of equal ones.

    first, second: of one shape, as NumPy reads them.
    """
    difference = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    error = float(np.square(difference).mean())
    return 10.0 * log10(255.0**2 / error) if error else inf


def same_latents(first: torch.Tensor, second: torch.Tensor) -> list[bool]:
    """Say of each picture's latents [B, h, w, D] whether they are those of the other, rounded."""
    difference = (first - second).abs().flatten(1).amax(1)
    return list(map(bool, difference < SAME))
