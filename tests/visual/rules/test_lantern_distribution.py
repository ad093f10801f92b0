"""A relaxed walk has LANTERN's distribution, and its excess is the true total variation."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from ragspec.rules.base import Rule
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.rules.lantern import Lantern, RelaxedWalk
from tests.support import codes
from tests.support.distributions import Distributions, DistributionTarget, emitted
from tests.support.enumeration import enumerate_outcomes
from tests.visual.rules.test_lantern import CODES, RELAXED

close = partial(pytest.approx, abs=1e-12)


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_excess_is_the_variation(rule: RelaxedWalk, width: int) -> None:
    masses = []
    for seed in range(6):
        distributions = Distributions(CODES, seed)
        p, tree = codes.distribution_after(distributions), codes.fixed(width)
        excess = codes.first_excess(rule, distributions, tree)
        result = codes.first_distribution(rule, distributions, tree)
        assert codes.variation(result, p) == close(excess)
        gained = distributions.mean_length(rule, tree) - distributions.mean_length(Walk(), tree)
        assert gained == close(excess)
        other = codes.first_excess(rule, distributions, tree, seed=1)
        assert excess == other, "depends on the noise"
        if isinstance(rule, Lantern):
            assert excess <= width * 0.15
        if width == 1:  # the distribution is the relaxed one
            code = int(distributions.draft(()).argmax())
            among = rule.related(code, p)
            assert np.abs(result - codes.relaxed_distribution(p, code, among)).max() < 1e-12
            assert excess == close(codes.mass(p, among))
        masses.append(excess)
    assert max(masses) > 0.02, "nothing was relaxed: the test shows nothing"


def test_sampled_candidates_shift_the_distribution_by_the_mean_excess_at_most() -> None:
    rule = RELAXED[0]
    for seed in range(3):
        distributions = Distributions(CODES, seed)
        outcomes = enumerate_outcomes(
            lambda noise, dists=distributions: excess_of(rule, dists, noise)  # type: ignore[misc]
        )
        mean = sum(weight * text[-1] for text, weight in outcomes.items())
        first = codes.first_distribution(rule, distributions, codes.sampled(1))
        assert codes.variation(first, codes.distribution_after(distributions)) <= mean + 1e-12


def excess_of(rule: Rule, distributions: Distributions, noise: NoiseStream) -> Any:
    tree = codes.sampled(1)(distributions, noise, ())
    verdict = rule.judge(tree, DistributionTarget(distributions, tree, (), noise))
    return (*emitted(tree, verdict), verdict.excess[0])
