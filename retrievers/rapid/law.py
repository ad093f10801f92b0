"""Between two laws: what RAPID adds to the target's logits (arXiv 2502.20330, equation 6)."""

from __future__ import annotations

import math

import torch

from ragspec.errors import InputError

ETA, ALPHA = 10.0, 0.1


def shift(p: torch.Tensor, q: torch.Tensor, scale: float, alpha: float) -> torch.Tensor:
    """Return what is added to the target's logits: laws p, q [.., V] -> [.., V]."""
    counts = q >= alpha * q.amax(-1, keepdim=True)
    return scale * (q - p) * counts


def checked(eta: float, alpha: float) -> tuple[float, float]:
    """Return both; raises InputError where they are outside their range."""
    if not (math.isfinite(eta) and eta >= 0.0 and 0.0 <= alpha <= 1.0):
        raise InputError(
            f"got eta {eta} and alpha {alpha}; expected eta of 0 or more, such as 5 to 20, and "
            "alpha from 0 to 1."
        )
    return float(eta), float(alpha)
