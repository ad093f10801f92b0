"""Between two laws: what RAPID adds to the target's logits (arXiv 2502.20330, equation 6).

mode "exact": nothing, the text is the target's. "steered": everywhere, see `steering`. "paper":
where it was drafted, see `published`.
"""

from __future__ import annotations

import math

import torch

from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import unknown

MODES = ("exact", "steered", "paper")
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


def eta_of(mode: str, eta: float | None) -> float:
    """Return eta as a mode has it; raises UnknownNameError for another mode, InputError for eta."""
    if mode not in MODES:
        raise UnknownNameError(unknown("mode", mode, MODES))
    if mode != "exact":
        return checked(ETA if eta is None else eta, ALPHA)[0]
    if eta:
        raise InputError(
            f"got eta={eta} with mode='exact', where the law is the target's; expected "
            "mode='steered' or 'paper', or no eta."
        )
    return 0.0
