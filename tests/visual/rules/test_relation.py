"""The codes that a drafted code stands for: prefixes, bounds, monotony (proofs T1 and T2)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.visual.rules.codebook import CodePartition
from ragspec.visual.rules.lantern import GSD, Lantern, LanternPlus, RelaxedWalk
from tests.support import codes

CODES = 32
TABLE = codes.neighbours(CODES, 20)


def distribution(seed: int, spread: float = 1.0) -> codes.Distribution:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(CODES, spread))
    p[rng.integers(CODES, size=6)] = 0.0  # as after a top-k filter
    return np.asarray(p / p.sum())


@given(seed=st.integers(0, 10**6), code=st.integers(0, CODES - 1), k=st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_related_codes_are_the_longest_prefix_in_the_bound(seed: int, code: int, k: int) -> None:
    p = distribution(seed)
    choices = (Lantern(TABLE, k, 0.07), LanternPlus(TABLE, k, 2.5))
    for rule in choices:
        bound = 0.07 * (p[code] > 0.0) if rule is choices[0] else 1.5 * p[code]
        result = rule.related(code, p)
        n = len(result)
        # The published repository takes k + 1, although its list leaves the code itself out.
        assert result.tolist() == TABLE.rows[code, :n].tolist() and n <= k
        assert codes.mass(p, result) <= bound
        if n < k:
            assert p[TABLE.rows[code, : n + 1]].sum() > bound - 1e-12
        relaxed = codes.relaxed_distribution(p, code, result)
        assert relaxed.sum() == pytest.approx(1.0, abs=1e-12)
        assert codes.variation(relaxed, p) == pytest.approx(codes.mass(p, result), abs=1e-6)
        assert (relaxed[result] == 0.0).all()
        others = np.setdiff1d(np.arange(CODES), [*result, code])
        assert (relaxed[others] == p[others]).all()
        if rule is choices[1]:
            assert relaxed[code] <= 2.5 * p[code] + 1e-12


def test_delta_and_lam_have_limits_of_their_kind() -> None:
    p = distribution(0)
    code = int(p.argmax())
    assert Lantern(TABLE, 5, 0.5).bound(p[code]) == 0.5
    assert LanternPlus(TABLE, 5, 1.5).bound(p[code]) == 0.5 * p[code]
    with pytest.raises(InputError, match=r"delta=5.*lantern\+\+"):
        Lantern(TABLE, 5, 5.0)
    with pytest.raises(InputError, match=r"lam=0\.5.*lantern"):
        LanternPlus(TABLE, 5, 0.5)


def test_a_cluster_is_related_whatever_it_weighs() -> None:
    partition = CodePartition.build(codes.codebook(CODES), 4)
    p = distribution(1)
    result = GSD(partition).related(9, p)
    inside = partition.clusters == partition.clusters[9]
    assert sorted([*result.tolist(), 9]) == np.flatnonzero(inside).tolist()
    assert codes.mass(p, result) == pytest.approx(p[inside].sum() - p[9])


@pytest.mark.parametrize(
    "rule", [GSD(CodePartition.build(codes.codebook(CODES), 4)), Lantern(TABLE, 5, 0.9)]
)
def test_a_code_that_the_distribution_excludes_stands_for_no_other(rule: RelaxedWalk) -> None:
    code = next(c for c in range(CODES) if len(rule.near[c]))
    p = np.zeros(CODES)
    p[rule.near[code][0]] = 0.8
    assert codes.mass(p, rule.related(code, p)) == 0.0
    p[code] = 0.2
    assert codes.mass(p, rule.related(code, p)) == 0.8
