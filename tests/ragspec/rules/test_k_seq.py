from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from ragspec.rules.k_seq import KSeq, division_factor
from ragspec.rules.rejection import ChainRejection, MultiStep
from tests.support.distributions import (
    Distributions,
    distribution_deviation,
    generate,
    grow,
    mean_length,
)
from tests.support.enumeration import enumerate_outcomes

EXACT = 1e-12


def test_one_candidate_is_chain_rejection() -> None:
    distributions, tree = Distributions(4, 2), partial(grow, widths=(1, 1))
    ours = enumerate_outcomes(lambda noise: generate(KSeq(), distributions, noise, tree))
    theirs = enumerate_outcomes(
        lambda noise: generate(ChainRejection(), distributions, noise, tree)
    )
    assert ours == pytest.approx(theirs, abs=EXACT)


def test_division_factor_is_the_smallest_safe_one() -> None:
    for seed in range(20):
        distributions, k = Distributions(6, seed), 2 + seed % 3
        p, q = distributions.target(()), distributions.draft(())
        rho = division_factor(p, q, k)
        assert 1.0 <= rho <= k

        def left(rho: float, p: torch.Tensor = p, q: torch.Tensor = q, k: int = k) -> float:
            overlap = torch.minimum(q, p / rho)
            beta = overlap.sum()
            return float((p - overlap * (1 - (1 - beta) ** k) / beta).min())

        assert left(rho) >= -EXACT
        beta = float(torch.minimum(q, p / rho).sum())
        assert 1 - (1 - beta) ** k == pytest.approx(rho * beta, abs=1e-9)


def test_division_factor_at_the_ends() -> None:
    p = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    assert division_factor(p, p, 1) == 1.0
    assert division_factor(p, p, 3) == pytest.approx(1.0)
    assert division_factor(p, p.flip(0), 3) == pytest.approx(3.0)


def test_disjoint_distributions_leave_the_target_alone() -> None:
    distributions = Distributions(4, 0)
    distributions.cache["target", ()] = torch.tensor([0.5, 0.5, 0.0, 0.0], dtype=torch.float64)
    distributions.cache["draft", ()] = torch.tensor([0.0, 0.0, 0.5, 0.5], dtype=torch.float64)
    assert (
        distribution_deviation(KSeq(), distributions, partial(grow, widths=(3,)), length=1) <= EXACT
    )


def test_three_candidates_beat_recursive_rejection() -> None:
    worlds, tree = [Distributions(3, seed) for seed in range(4)], partial(grow, widths=(3,))
    ours, theirs = (
        np.mean([mean_length(rule, distributions, tree) for distributions in worlds])
        for rule in (KSeq(), MultiStep())
    )
    assert ours > theirs + 0.005
