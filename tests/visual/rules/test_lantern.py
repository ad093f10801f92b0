"""Relaxed walks: without relaxation they are the walk; images differ from a replaced code on."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec import Engine, Sampling
from ragspec.errors import InputError, RuleError
from ragspec.rules.base import Rule
from ragspec.rules.walk import Walk
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import promised
from ragspec.visual.rules.codebook import CodePartition
from ragspec.visual.rules.lantern import GSD, Lantern, LanternPlus, RelaxedWalk
from tests.ragspec.rules.test_walk import plain
from tests.ragspec.trees.test_operations import trees
from tests.support import codes, tiny
from tests.support.distributions import Distributions, Grow, emitted

CODES = 8
TABLE = codes.neighbours(CODES, 6)
PARTITION = CodePartition.build(codes.codebook(CODES), 3)
NOTHING: list[RelaxedWalk] = [
    Lantern(TABLE, k=0, delta=0.5),
    Lantern(TABLE, delta=0.0),
    LanternPlus(TABLE, lam=1.0),
    LanternPlus(TABLE, k=0, lam=9.0),
    GSD(CodePartition(np.arange(CODES, dtype=np.int32))),
    GSD(PARTITION, tv_budget=0.0),
]
HARDLY: list[RelaxedWalk] = [
    Lantern(TABLE, delta=1e-9),
    LanternPlus(TABLE, lam=1.0 + 1e-9),
    GSD(PARTITION, tv_budget=1e-9),
]
RELAXED: list[RelaxedWalk] = [Lantern(TABLE, 4, 0.15), LanternPlus(TABLE, 6, 4.0), GSD(PARTITION)]


@given(tree=trees(vocab=CODES), seed=st.integers(0, 10**6), kind=st.sampled_from(list(DraftKind)))
@settings(max_examples=80, deadline=None)
def test_no_relaxation_is_the_walk(tree: DraftTree, seed: int, kind: DraftKind) -> None:
    distributions, noise = Distributions(CODES, 0), NoiseStream(seed)
    tree = replace(tree, kind=kind)
    walk = distributions.judge(Walk(), tree, noise)
    for rule in [*NOTHING, *HARDLY]:
        verdict = distributions.judge(rule, tree, noise)
        assert (verdict.path, verdict.token) == (walk.path, walk.token)
        assert sum(verdict.excess) <= 1e-8
        assert len(verdict.excess) == len(walk.path) + 1
    assert {rule.label for rule in NOTHING} == {rule.open().label for rule in NOTHING} == {"exact"}


@pytest.mark.parametrize("rule", RELAXED, ids=lambda rule: rule.name)
@pytest.mark.parametrize("tree", [codes.fixed(2, 1), codes.coupled(2, 1), codes.coupled(1, 1, 1)])
def test_a_picture_is_the_plain_one_until_a_code_is_replaced(rule: Rule, tree: Grow) -> None:
    replaced = 0
    for seed in range(100):
        distributions, noise = Distributions(CODES, seed % 9), NoiseStream(seed)
        draft = tree(distributions, noise, ())
        verdict = distributions.judge(rule, draft, noise)
        text, truth = emitted(draft, verdict), plain(distributions, noise, 4)
        place = next((i for i, code in enumerate(text) if code != truth[i]), None)
        if draft.kind is DraftKind.COUPLED:
            assert next((i for i, figure in enumerate(verdict.excess) if figure), None) == place
            assert set(verdict.excess) <= {0.0, 1.0}
        elif place is not None:
            assert verdict.excess[place] > 0.0
        replaced += place is not None
    assert replaced > 0


@given(tree=trees(vocab=CODES), seed=st.integers(0, 10**6), gain=st.floats(0.0, 3.0))
@settings(max_examples=120, deadline=None)
def test_codes_stand_for_others_only_above_a_gain(tree: DraftTree, seed: int, gain: float) -> None:
    distributions, noise = Distributions(CODES, seed % 5), NoiseStream(seed)
    free, picky = Lantern(TABLE, 6, 0.5), Lantern(TABLE, 6, 0.5, least_gain=gain)
    tree = replace(tree, kind=DraftKind.COUPLED)
    result, below = distributions.judge(picky, tree, noise), promised(tree)
    for node, figure in zip(result.path, result.excess, strict=False):
        assert figure == 0.0 or below[node] >= gain
    if not gain:
        assert result == distributions.judge(free, tree, noise)
    huge = distributions.judge(Lantern(TABLE, 6, 0.5, least_gain=1e9), tree, noise)
    walk = distributions.judge(Walk(), tree, noise)
    assert (huge.path, huge.token, sum(huge.excess)) == (walk.path, walk.token, 0.0)


def test_a_gain_bounds_as_before() -> None:
    # Codes that may not stand for others leave their mass in place: the excess is the moved mass.
    for seed in range(60):
        distributions, noise = Distributions(CODES, seed % 9), NoiseStream(seed)
        tree = replace(codes.coupled(2, 2)(distributions, noise, ()), kind=DraftKind.DETERMINISTIC)
        free = distributions.judge(Lantern(TABLE, 6, 0.5), tree, noise).excess[0]
        picky = distributions.judge(Lantern(TABLE, 6, 0.5, least_gain=1.0), tree, noise).excess[0]
        assert 0.0 <= picky <= free + 1e-12


@pytest.mark.parametrize(
    "tree", [codes.fixed(1), codes.fixed(2), codes.coupled(1), codes.coupled(2), codes.sampled(2)]
)
def test_clusters_keep_their_distribution(tree: Grow) -> None:
    rule, clusters, moved = GSD(PARTITION), PARTITION.clusters, 0
    for seed in range(120):
        distributions, noise = Distributions(CODES, seed % 4), NoiseStream(seed)
        draft = tree(distributions, noise, ())
        code = emitted(draft, distributions.judge(rule, draft, noise))[0]
        current = plain(distributions, noise, 1)[0]
        assert clusters[code] == clusters[current]
        moved += code != current
    assert moved > 0
    if tree(Distributions(CODES, 0), NoiseStream(0), ()).kind is DraftKind.DETERMINISTIC:
        result = codes.first_distribution(rule, Distributions(CODES, 0), tree)
        p = codes.distribution_after(Distributions(CODES, 0))
        for cluster in range(3):
            inside = clusters == cluster
            assert result[inside].sum() == pytest.approx(p[inside].sum(), abs=1e-12)


def test_nothing_follows_the_end() -> None:
    distributions, tree = Distributions(CODES, 3, end=1), DraftTree.chain([1, 2], "any")
    rule, noises = Lantern(TABLE, 6, 0.4), map(NoiseStream, range(60))
    verdicts = [distributions.judge(rule, tree, noise) for noise in noises]
    assert {verdict.path for verdict in verdicts} == {(), (0,)}
    for verdict in verdicts:
        assert len(verdict.excess) == 1
        assert (verdict.token is None) == bool(verdict.path)


@pytest.mark.parametrize("instance", [Lantern, LanternPlus, GSD])
def test_relaxed_rules_by_name_alone_are_refused(instance: type[RelaxedWalk]) -> None:
    with pytest.raises(InputError, match="make_rule"):
        instance()  # type: ignore[call-arg]
    with pytest.raises(InputError, match="which codes look alike"):
        Engine(tiny.model(), drafter=None, rule=instance.name)


def test_another_code_book_is_refused() -> None:
    small = Lantern(codes.neighbours(5, 3), delta=0.3)
    for code in (1, 7):
        with pytest.raises(RuleError, match=r"chooses among 8 codes.*code-book of 5"):
            Distributions(CODES, 0).judge(small, DraftTree.chain([code], "any"), NoiseStream(0))
    with pytest.raises(RuleError, match="code-book"):
        pictures(Lantern(codes.neighbours(50, 5), delta=0.3), drafter="context")


def test_coupled_drafts_are_judged_as_by_the_whole_distribution() -> None:
    for seed in range(150):
        rule, noise = Lantern(TABLE, 6, 0.5), NoiseStream(seed)
        distributions = Distributions(CODES, seed % 9)
        tree = codes.coupled(3)(distributions, noise, ())
        full = distributions.judge(rule, replace(tree, kind=DraftKind.DETERMINISTIC), noise)
        assert distributions.judge(rule, tree, noise).path == full.path


PROMPTS = [[5, 6, 7, 8, 9, 5, 6], [40, 41, 3, 40, 41], [9] * 8]
SAMPLING = Sampling(temperature=0.7, seed=[3, 4, 5])
NEW = 24


def pictures(rule: Rule | str, **drafts: Any) -> list[Any]:
    engine = Engine(tiny.model(), rule=rule, budget=6, **drafts)
    results: list[Any] = engine.generate(PROMPTS, SAMPLING, max_new_tokens=NEW, ignore_eos=True)
    return results


@pytest.mark.parametrize("deterministic", [True, False])
def test_reports_measure_the_excess(deterministic: bool) -> None:
    by_model: dict[str, Any] = {"drafter": None, "draft_model": tiny.model(seed=1)}
    drafts = {"drafter": "context"} if deterministic else by_model
    table = codes.neighbours(tiny.VOCAB, 60)
    exact = pictures("walk", **drafts)
    none = pictures(Lantern(table, delta=0.0), **drafts)
    relaxed = pictures(Lantern(table, delta=0.6), **drafts)
    budgeted = pictures(Lantern(table, delta=0.6, tv_budget=0.4), **drafts)
    assert [g.tokens for g in none] == [g.tokens for g in exact]
    for result in exact + none:
        assert (result.label, result.report.tv_excess) == ("exact", 0.0)
    for result in relaxed + budgeted:
        figures = [figure for step in result.steps for figure in step.excess]
        assert len(figures) == len(result.tokens) == NEW
        assert result.report.tv_excess == pytest.approx(sum(figures) / NEW)
    assert sum(g.report.tv_excess for g in relaxed) > 0.0
    assert sum(g.report.accepted for g in relaxed) > sum(g.report.accepted for g in exact)
    assert {g.label for g in relaxed} == {"approximate"}
    assert {g.label for g in budgeted} == {"bounded(tv<=0.4)" if deterministic else "approximate"}
    for result in budgeted:
        assert result.report.tv_excess * NEW <= 0.4 + 1e-9
    if not deterministic:  # a budget below one leaves no room for a whole replaced code
        assert [g.tokens for g in budgeted] == [g.tokens for g in exact]
