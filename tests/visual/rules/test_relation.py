"""Which codes a drafted code stands for: prefixes, bounds, monotony (T1 and T2 of the proofs)."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.visual.rules import relation as module
from ragspec.visual.rules.codebook import CodePartition
from ragspec.visual.rules.relation import (
    Relation,
    nearest_by_ratio,
    nearest_within,
    related,
    same_cluster,
)
from tests.support.codes import (
    Distribution,
    broken,
    codebook,
    neighbours,
    relaxed_distribution,
    variation,
)

CODES = 32
TABLE = neighbours(CODES, 20)


def distribution(seed: int, spread: float = 1.0) -> Distribution:
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(CODES, spread))
    p[rng.integers(CODES, size=6)] = 0.0  # as after a top-k filter
    return np.asarray(p / p.sum())


def check_prefix(where: Any, seed: int, code: int, k: int) -> None:
    """Check that related codes, by a module, are the longest prefix within the bound."""
    p = distribution(seed)
    within, by_ratio = where.nearest_within(TABLE, k, 0.07), where.nearest_by_ratio(TABLE, k, 2.5)
    for relation, bound in ((within, 0.07 * (p[code] > 0.0)), (by_ratio, 1.5 * p[code])):
        result = where.related(relation, code, p)
        n = len(result.codes)
        assert result.codes.tolist() == TABLE.rows[code, :n].tolist() and n <= k
        assert result.mass == pytest.approx(p[result.codes].sum(), abs=1e-12)
        assert result.mass <= bound
        if n < k:
            assert p[TABLE.rows[code, : n + 1]].sum() > bound - 1e-12
        relaxed = relaxed_distribution(p, code, result)
        assert relaxed.sum() == pytest.approx(1.0, abs=1e-12)
        assert variation(relaxed, p) == pytest.approx(result.mass, abs=1e-6)
        assert (relaxed[result.codes] == 0.0).all()
        others = np.setdiff1d(np.arange(CODES), [*result.codes, code])
        assert (relaxed[others] == p[others]).all()
        if relation is by_ratio:
            assert relaxed[code] <= 2.5 * p[code] + 1e-12


@given(seed=st.integers(0, 10**6), code=st.integers(0, CODES - 1), k=st.integers(0, 20))
@settings(max_examples=100, deadline=None)
def test_the_related_codes_are_the_longest_prefix_within_the_bound(
    seed: int, code: int, k: int
) -> None:
    check_prefix(module, seed, code, k)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('side="right"))', 'side="right")) + 1'),
        ("masses = p[codes].cumsum()", "codes = codes[1:]; masses = p[codes].cumsum()"),
        ("neighbours.rows[:, :count]", "neighbours.rows"),
    ],
)
def test_prefixes_off_by_one_are_visible(old: str, new: str) -> None:
    # The published repository counts k + 1 although its list leaves the code itself out.
    wrong = broken(module, old, new)
    with pytest.raises(AssertionError):
        for seed, code in itertools.product(range(10), range(CODES)):
            check_prefix(wrong, seed, code, 4)


def test_two_parameters_never_mean_one_another() -> None:
    p = distribution(0)
    code = int(p.argmax())
    assert nearest_within(TABLE, 5, 0.5).bound(p[code]) == 0.5
    assert nearest_by_ratio(TABLE, 5, 1.5).bound(p[code]) == 0.5 * p[code]
    with pytest.raises(InputError, match=r"delta=5.*lantern\+\+"):
        nearest_within(TABLE, 5, 5.0)
    with pytest.raises(InputError, match=r"lam=0\.5.*lantern"):
        nearest_by_ratio(TABLE, 5, 0.5)


def test_a_cluster_is_related_whatever_it_weighs() -> None:
    partition = CodePartition.build(codebook(CODES), 4)
    p = distribution(1)
    result = related(same_cluster(partition), 9, p)
    inside = partition.clusters == partition.clusters[9]
    assert sorted([*result.codes.tolist(), 9]) == np.flatnonzero(inside).tolist()
    assert result.mass == pytest.approx(p[inside].sum() - p[9])


@pytest.mark.parametrize(
    "relation",
    [same_cluster(CodePartition.build(codebook(CODES), 4)), nearest_within(TABLE, 5, 0.9)],
)
def test_a_code_that_the_distribution_excludes_stands_for_no_other(relation: Relation) -> None:
    code = next(c for c in range(relation.size) if len(relation.near[c]))
    p = np.zeros(relation.size)
    p[relation.near[code][0]] = 0.8
    assert related(relation, code, p).mass == 0.0
    p[code] = 0.2
    assert related(relation, code, p).mass == 0.8


def test_k_beyond_the_table_is_refused() -> None:
    with pytest.raises(InputError, match="holds 20 neighbours"):
        nearest_within(TABLE, 21)
