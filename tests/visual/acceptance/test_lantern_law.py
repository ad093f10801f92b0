"""The law of a relaxed walk is LANTERN's, and the figure it tells is the true variation."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.acceptance.base import Rule
from ragspec.acceptance.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.acceptance.lantern import Lantern, LanternPlus, RelaxedWalk
from ragspec.visual.acceptance.relation import related, relaxed_law
from tests.ragspec.acceptance.test_walk import plain
from tests.support.codes import (
    chi_square,
    coupled,
    first_excess,
    first_law,
    fixed,
    law_after,
    sampled,
    variation,
)
from tests.support.enumeration import Tokens, enumerate_outcomes
from tests.support.laws import Grow, Laws, LawTarget, emitted, generate, judged, mean_length
from tests.visual.acceptance.test_lantern import CODES, RELAXED, TABLE


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
def test_one_deterministic_candidate_gives_the_relaxed_law(rule: RelaxedWalk) -> None:
    masses = []
    for seed in range(6):
        laws = Laws(CODES, seed)
        p, code = law_after(laws), int(laws.draft(()).argmax())
        among = related(rule.relation, code, p)
        found = first_law(rule, laws, fixed(1))
        assert np.abs(found - relaxed_law(p, code, among)).max() < 1e-12
        assert variation(found, p) == pytest.approx(among.mass, abs=1e-12)
        assert first_excess(rule, laws, fixed(1)) == pytest.approx(among.mass, abs=1e-12)
        accepted = mean_length(rule, laws, fixed(1)) - mean_length(Walk(), laws, fixed(1))
        assert accepted == pytest.approx(among.mass, abs=1e-12)
        masses.append(among.mass)
    assert max(masses) > 0.02, "nothing was relaxed: the test shows nothing"


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("width", [2, 3])
def test_with_siblings_the_excess_is_the_variation(rule: RelaxedWalk, width: int) -> None:
    for seed in range(5):
        laws = Laws(CODES, seed)
        p, tree = law_after(laws), fixed(width)
        excess = first_excess(rule, laws, tree)
        assert variation(first_law(rule, laws, tree), p) == pytest.approx(excess, abs=1e-12)
        gained = mean_length(rule, laws, tree) - mean_length(Walk(), laws, tree)
        assert gained == pytest.approx(excess, abs=1e-12)
        assert excess == first_excess(rule, laws, tree, seed=1), "depends on the noise"
        if isinstance(rule, Lantern):
            assert excess <= width * 0.15


def test_sampled_candidates_shift_the_law_by_the_mean_excess_at_most() -> None:
    rule = RELAXED[0]
    for seed in range(3):
        laws = Laws(CODES, seed)
        outcomes = enumerate_outcomes(lambda noise, laws=laws: excess_of(rule, laws, noise))  # type: ignore[misc]
        mean = sum(weight * text[-1] for text, weight in outcomes.items())
        assert variation(first_law(rule, laws, sampled(1)), law_after(laws)) <= mean + 1e-12


def excess_of(rule: Rule, laws: Laws, noise: NoiseStream) -> Any:
    tree = sampled(1)(laws, noise, ())
    verdict = rule.judge(tree, LawTarget(laws, tree, (), noise))
    return (*emitted(tree, verdict), verdict.excess[0])


def test_lantern_plus_makes_a_code_at_most_lam_times_as_likely() -> None:
    for seed in range(6):
        laws = Laws(CODES, seed)
        code = int(laws.draft(()).argmax())
        found = first_law(LanternPlus(TABLE, lam=1.7), laws, fixed(1))
        assert found[code] <= 1.7 * law_after(laws)[code] + 1e-12


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
def test_real_noise_gives_the_closed_form(rule: RelaxedWalk) -> None:
    samples = 3000

    def moved(laws: Laws) -> float:
        return related(rule.relation, int(laws.draft(()).argmax()), law_after(laws)).mass

    laws = max((Laws(CODES, seed) for seed in range(12)), key=moved)
    p, code = law_after(laws), int(laws.draft(()).argmax())
    expected = relaxed_law(p, code, related(rule.relation, code, p))
    tree = fixed(1)(laws, NoiseStream(0), ())
    counts = np.zeros(CODES)
    for seed in range(samples):
        counts[emitted(tree, judged(rule, tree, laws, NoiseStream(seed)))[0]] += 1
    assert chi_square(counts, samples * expected) > 1e-4
    assert chi_square(counts, samples * p) < 1e-6, "the test would not see the relaxation"


@pytest.mark.parametrize("tree", [fixed(1), fixed(3), coupled(1), coupled(3)])
def test_acceptance_grows_with_k_delta_and_lam(tree: Grow) -> None:
    chains: list[list[RelaxedWalk]] = [
        [Lantern(TABLE, k, 0.4) for k in range(7)],
        [Lantern(TABLE, 6, d) for d in (0.0, 0.02, 0.1, 0.3, 0.8)],
        [LanternPlus(TABLE, 6, x) for x in (1.0, 1.2, 2.0, 5.0, 50.0)],
    ]
    for chain in chains:
        total = []
        for seed in range(150):
            laws, noise = Laws(CODES, seed % 5), NoiseStream(seed)
            draft = tree(laws, noise, ())
            total.append([len(judged(rule, draft, laws, noise).path) for rule in chain])
            assert total[-1] == sorted(total[-1])
        assert sum(row[0] for row in total) < sum(row[-1] for row in total)


def test_drafted_codes_are_emitted_as_themselves() -> None:
    # What a sibling carries is not given to another that it is near to.
    laws = Laws(CODES, 2)
    every = DraftTree.build(range(CODES), [-1] * CODES, "all")
    for seed in range(30):
        noise = NoiseStream(seed)
        verdict = judged(Lantern(TABLE, delta=0.9), every, laws, noise)
        assert emitted(every, verdict)[0] == plain(laws, noise, 1)[0]
        assert verdict.excess[0] == 0.0


def test_more_likely_codes_are_not_preferred() -> None:
    """The law given a drafted code is p off the related codes, in proportion."""
    laws, rule = Laws(CODES, 4), Lantern(TABLE, 5, 0.3)
    found: defaultdict[Tokens, float] = defaultdict(float)
    for text, weight in enumerate_outcomes(
        lambda noise: generate(rule, laws, noise, fixed(1))
    ).items():
        found[text[:1]] += weight
    code = int(laws.draft(()).argmax())
    p = law_after(laws)
    among = related(rule.relation, code, p)
    for (other,), weight in found.items():
        if other != code:
            assert other not in among.codes
            assert weight == pytest.approx(p[other], abs=1e-12)
    assert torch.tensor(list(found.values())).sum() == pytest.approx(1.0)
