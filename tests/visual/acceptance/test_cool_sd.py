"""Cool-SD: its law is the closed form, its figure the true variation, and 1 is plain rejection."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.acceptance.rejection import ChainRejection
from ragspec.errors import InputError, RuleError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.visual.acceptance import cool_sd as module
from ragspec.visual.acceptance.cool_sd import Cool
from tests.support.codes import Law, broken, first_law, fixed, law_after, sampled, variation
from tests.support.enumeration import enumerate_outcomes
from tests.support.laws import Laws, generate, grow, judged, law_deviation, mean_length

CODES = 6


def closed_form(p: Law, q: Law, omega: float) -> Law:
    accepted = np.minimum(q, omega * p)
    left = np.maximum(p - q, 0.0)
    return accepted + (1 - accepted.sum()) * left / left.sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize("delta", [1.1, 2.0, 10.0])
def test_the_law_is_the_closed_form(delta: float) -> None:
    for seed in range(3):
        laws, rule = Laws(CODES, seed), Cool(delta=delta, mu=0.0)
        p, q = law_after(laws), laws.draft(()).numpy()
        found = first_law(rule, laws, sampled(1))
        assert np.abs(found - closed_form(p, q, delta)).max() < 1e-12
        gained = mean_length(rule, laws, sampled(1)) - mean_length(
            ChainRejection(), laws, sampled(1)
        )
        excess = judged(rule, sampled(1)(laws, NoiseStream(1), ()), laws, NoiseStream(1)).excess
        assert variation(found, p) == pytest.approx(gained, abs=1e-12)
        assert variation(found, p) == pytest.approx(excess[0], abs=1e-12)
        assert variation(found, p) <= variation(p, q) + 1e-12


@pytest.mark.parametrize("rule", [Cool(delta=1.0, nu=0.0), Cool(delta=0.2), Cool(0.5, mu=0.0)])
def test_no_relaxation_is_plain_rejection(rule: Cool) -> None:
    assert rule.label == "exact-for(law)"
    for seed in range(60):
        laws, noise = Laws(CODES, seed % 4), NoiseStream(seed)
        tree = sampled(1, 1, 1)(laws, noise, ())
        got, plain = judged(rule, tree, laws, noise), judged(ChainRejection(), tree, laws, noise)
        assert (got.path, got.token) == (plain.path, plain.token)
        assert sum(got.excess) == pytest.approx(0.0, abs=1e-12)
        assert len(got.excess) == len(got.path) + 1


def test_relaxation_falls_with_depth_and_its_mean_is_delta() -> None:
    rule = Cool(delta=4.0, nu=0.3, length=4)
    omegas = [rule.omega(depth) for depth in range(4)]
    assert omegas == sorted(omegas, reverse=True) and omegas[0] > 4.0 > omegas[3]
    assert np.mean(omegas) == pytest.approx(4.0)
    assert rule.omega(100) == 1.0
    assert Cool(delta=3.0, nu=0.5, mu=0.25).omega(1) == pytest.approx(3.0 * np.exp(-0.75))
    assert rule.label == "approximate"


def test_acceptance_grows_with_delta() -> None:
    laws = Laws(CODES, 1)
    lengths = [mean_length(Cool(d, mu=0.0), laws, sampled(1)) for d in (1.0, 1.5, 2.0, 5.0, 50.0)]
    assert lengths == sorted(lengths) and lengths[-1] > lengths[0] + 0.05


def test_depths_are_told_apart() -> None:
    # Only the first code is relaxed: what follows it keeps its law.
    laws, rule = Laws(3, 1, alike=0.0), Cool(delta=3.0, nu=9.0, mu=0.0)
    outcomes = enumerate_outcomes(lambda noise: generate(rule, laws, noise, sampled(1, 1)))
    both: dict[int, Law] = {}
    for text, weight in outcomes.items():
        if len(text) > 1:
            both.setdefault(text[0], np.zeros(3))[text[1]] += weight
    for first, found in both.items():
        assert variation(found / found.sum(), law_after(laws, (first,))) < 1e-12
    flat = Cool(delta=3.0, nu=0.0, mu=0.0)
    assert law_deviation(flat, laws, sampled(1, 1), 2) > law_deviation(rule, laws, sampled(1, 1), 2)


def test_the_end_of_the_text_is_kept() -> None:
    laws, rule = Laws(3, 0, end=1), Cool(delta=1.0, mu=0.0)
    assert law_deviation(rule, laws, sampled(1, 1), length=3) <= 1e-12


def test_what_it_cannot_judge_is_refused() -> None:
    laws, noise = Laws(4, 0), NoiseStream(0)
    with pytest.raises(RuleError, match="accepts sampled"):
        judged(Cool(), fixed(1)(laws, noise, ()), laws, noise)
    with pytest.raises(RuleError, match="expected a chain"):
        judged(Cool(), sampled(2)(laws, noise, ()), laws, noise)
    empty = DraftTree.empty(DraftKind.SAMPLED)
    assert judged(Cool(), empty, laws, noise).excess == (0.0,)
    bad: list[dict[str, Any]] = [{"delta": 0.0}, {"nu": -1.0}, {"length": 0}, {"length": 1.5}]
    bad += [{"mu": mu} for mu in (math.nan, math.inf, -math.inf, -1000.0, "1")]
    bad += [{"delta": 1e308}, {"delta": 1e-30, "mu": -720.0}]
    for settings in bad:
        with pytest.raises(InputError, match="expected delta above"):
            Cool(**settings)
    for mu in (-600.0, 1e300):
        assert math.isfinite(Cool(mu=mu).omega(0))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("p - accepted, p", "p, p"),
        ("omega * ratio(", "ratio("),
        ("torch.minimum(q, omega * p)", "torch.minimum(q, p) * omega"),
    ],
)
def test_broken_rules_are_seen(old: str, new: str) -> None:
    laws = Laws(CODES, 1)
    p, q = law_after(laws), laws.draft(()).numpy()
    tree = partial(grow, widths=(1,))
    noise = NoiseStream(0)

    def off(where: object) -> float:
        rule = where.Cool(delta=2.0, mu=0.0)  # type: ignore[attr-defined]
        found = first_law(rule, laws, tree)
        excess = judged(rule, tree(laws, noise, ()), laws, noise).excess[0]
        wrong = np.abs(found - closed_form(p, q, 2.0)).max()
        return max(float(wrong), abs(excess - variation(found, p)))

    assert off(module) < 1e-12
    assert off(broken(module, old, new)) > 1e-3
    assert torch.is_tensor(laws.target(()))
