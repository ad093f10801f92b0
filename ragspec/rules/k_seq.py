"""k-SEQ, the rule of SpecTr: Sun et al. (arXiv 2310.15141).

The k children are independent draws from the draft's distribution q; p is the target's. Each child
x passes with probability min(1, p(x) / (rho q(x))), and the first one that passes is accepted. If
none passes, a token is drawn from the remaining mass of p. The division factor rho in [1, k] is the
smallest for which no token is accepted more often than p allows: with beta = sum min(q, p / rho),
the root of 1 - (1 - beta)^k = rho beta.

Deviation: k is the number of candidates that are left at the node, as in the paper, but they may
also be the children of one node, not only separate chains.
"""

from bisect import bisect_left
from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.rules.rejection import Choice, Descent, Uniform, normalised, ratio

_HALVINGS = 32


class KSeq(Descent):
    """Accepts the first of k independent children that passes a test divided by rho."""

    name = "k-seq"

    @staticmethod
    def choose(tokens: Sequence[int], p: Tensor, q: Tensor, uniform: Uniform) -> Choice:
        """Accept each token with probability min(1, p / (rho q)), else leave the rest of p."""
        k = len(tokens)
        rho = division_factor(p, q, k)
        for rank, token in enumerate(tokens):
            if uniform(rank) < ratio(p, q, token) / rho:
                return rank, p
        overlap = torch.minimum(q, p / rho)
        return None, normalised(p - overlap * _tries(float(overlap.sum()), k), p)


def division_factor(p: Tensor, q: Tensor, k: int) -> float:
    """Return the smallest rho in [1, k] that leaves p non-negative after k tries.

    The value lies above the root by at most k * 2^-32, so the distribution stays exact.

    Args:
        p, q: Distributions of target and draft, f64 [V].
        k: Number of children.
    """
    if _spare(p, q, k, 1.0) >= 0.0:
        return 1.0
    step = (k - 1) * 2.0**-_HALVINGS
    places = range(1 << _HALVINGS)
    return 1.0 + step * bisect_left(places, 0.0, key=lambda i: _spare(p, q, k, 1.0 + step * i))


def _spare(p: Tensor, q: Tensor, k: int, rho: float) -> float:
    """Return rho less the factor by which k tries multiply the share of one try of p / rho."""
    return rho - _tries(float(torch.minimum(q, p / rho).sum()), k)


def _tries(beta: float, k: int) -> float:
    """Return 1 + (1 - beta) + ... + (1 - beta)^(k-1), which is (1 - (1 - beta)^k) / beta."""
    return sum((1.0 - beta) ** tried for tried in range(k))
