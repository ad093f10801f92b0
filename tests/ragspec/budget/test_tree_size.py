from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.budget.base import Settings
from ragspec.budget.cost_curve import ROWS, CostCurve
from ragspec.budget.gains import BUCKETS, Experience
from ragspec.budget.policy import AutoBudget
from ragspec.budget.tree_size import GoodputSession
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree

HOST = 0.2
SETTINGS = Settings(margin=0.03, probe_share=0.0, maximum=BUCKETS[-1])


def linear(base: float = 10.0, row: float = 0.4) -> CostCurve:
    """A forward of `base` ms and `row` ms more for each further row."""
    return CostCurve((128,), np.array([[(base + row * (n - 1)) / 1000 for n in ROWS]]))


@st.composite
def trees(draw: st.DrawFn, most: int = 7) -> DraftTree:
    n = draw(st.integers(1, most))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    accept_prob: list[float] = []
    for parent in parents:
        share = draw(st.integers(1, 20)) / 20
        accept_prob.append(share * (accept_prob[parent] if parent >= 0 else 1.0))
    return DraftTree.build(list(range(n)), parents, "a", accept_prob=accept_prob)


def closed_sets(tree: DraftTree) -> list[tuple[int, ...]]:
    parents = tree.parents.tolist()
    nodes = range(len(tree))
    subsets = itertools.chain.from_iterable(
        itertools.combinations(nodes, size) for size in range(len(tree) + 1)
    )
    return [
        selected for selected in subsets if all(parents[i] in (-1, *selected) for i in selected)
    ]


@given(trees(), st.floats(0.05, 6.0), st.floats(0.0, 5.0))
def test_no_closed_set_of_nodes_gives_more_tokens_for_the_time_of_the_step(
    tree: DraftTree, row: float, draft: float
) -> None:
    cost = linear(row=row)
    session = AutoBudget(margin=0.0).open(cost)
    request = session.allowance(128)
    for _ in range(20):
        session.experience.draft.learn(request, draft)
    accept_prob: list[float] = tree.accept_prob.tolist()
    fixed = session.experience.draft.of(request)
    assert fixed == pytest.approx(draft)

    def ratio(chosen: tuple[int, ...]) -> float:
        time = 1000 * cost.seconds(len(chosen) + 1, 128) + fixed
        return (1.0 + sum(accept_prob[i] for i in chosen)) / time

    selected = tuple(session.fit(tree, 128).tokens.tolist())
    sizes = {*BUCKETS, len(tree)}
    best = max(ratio(chosen) for chosen in closed_sets(tree) if len(chosen) in sizes)
    assert selected in closed_sets(tree)
    assert ratio(selected) == pytest.approx(best, rel=1e-6)


def test_a_sure_token_is_taken_in_poor_text_however_fast_rich_text_goes() -> None:
    """After a quotation at many tokens a step, a plain step still yields one for its time."""
    session = AutoBudget().open(linear(base=5.5, row=2.0))
    session.experience.learn_step(15.0, 12.0)
    session.allowance(128)
    assert len(session.fit(DraftTree.chain([1], "a", accept_prob=[0.9]), 128)) == 1


@pytest.mark.parametrize("dear", [(0.1, 1.3), (1.3, 2.5), (2.5, 8.0)])
def test_dearer_verification_never_takes_a_larger_tree(dear: tuple[float, float]) -> None:
    tree = DraftTree.chain(list(range(16)), "a", accept_prob=[0.85 ** (i + 1) for i in range(16)])
    sizes = []
    for row in dear:
        session = AutoBudget().open(linear(row=row))
        session.allowance(128)
        sizes.append(len(session.fit(tree, 128)))
    assert sizes[0] > sizes[1]


class Drafter:
    """Proposes chains that claim much; whether they are right is up to the test."""

    def __init__(self, claim: float, milliseconds: float, source: str = "a") -> None:
        self.claim, self.milliseconds, self.source = claim, milliseconds, source
        self.reading = 0.0  # milliseconds that the first draft of a row takes besides
        self.bucket: list[int] = []
        self.verified: list[int] = []

    def step(self, session: GoodputSession, cost: CostCurve, right: int) -> float:
        """Take one step of which `right` tokens can be accepted; returns its milliseconds."""
        allowed = session.adviser.nodes(None, session.allowance(128))
        self.bucket.append(allowed)
        tree = DraftTree.empty()
        if allowed:
            claims = [self.claim ** (i + 1) for i in range(allowed)]
            tree = session.fit(
                DraftTree.chain(list(range(allowed)), self.source, accept_prob=claims), 128
            )
        self.verified.append(len(tree))
        accepted = min(right, len(tree))
        token = accepted if accepted < right else 99
        spent = {
            "draft": self.milliseconds + self.reading if allowed else 0.0,
            "verify": 1000 * cost.seconds(len(tree) + 1, 128),
            "commit": 0.0,
            "host": HOST,
        }
        tokens = (*range(accepted), token)
        self.reading = 0.0 if allowed else self.reading
        session.observe(Step(tree, tuple(range(accepted)), tokens, spent), 128)
        return sum(spent.values())


def play(drafter: Drafter, session: GoodputSession, rights: list[int]) -> float:
    """Take a step for each number of right tokens; return the milliseconds spent."""
    cost = linear()
    return sum(drafter.step(session, cost, right) for right in rights)


def test_switches_off_for_a_useless_drafter_and_on_when_it_becomes_useful() -> None:
    session = AutoBudget().open(linear())
    drafter = Drafter(claim=0.9, milliseconds=5.0)
    play(drafter, session, [0] * 120)
    assert drafter.bucket[-40:].count(0) >= 36
    while drafter.bucket[-1]:
        play(drafter, session, [0])
    play(drafter, session, [8] * 300)
    assert all(request > 0 for request in drafter.bucket[-20:])
    assert session.reason is None


@pytest.mark.parametrize("milliseconds", [0.05, 0.5, 2.0, 5.0, 50.0])
def test_the_time_lost_to_a_useless_drafter_is_bounded(milliseconds: float) -> None:
    policy, plain = AutoBudget(), 10.0 + HOST
    drafter = Drafter(claim=0.9, milliseconds=milliseconds)
    first = play(drafter, policy.open(linear()), [0] * 500)
    assert first <= 500 * plain + 8 * (plain + milliseconds) + 0.008 * 500 * plain
    lengths = [96, 500, *[96] * 20]  # the rows share what trials may cost
    later = sum(play(drafter, policy.open(linear()), [0] * steps) for steps in lengths)
    assert later <= 1.015 * sum(lengths) * plain + plain + milliseconds


def test_a_free_drafter_is_requested_at_every_step_yet_costs_no_verification() -> None:
    session = AutoBudget().open(linear())
    drafter = Drafter(claim=0.6, milliseconds=0.02)
    play(drafter, session, [0] * 120)
    assert 0 not in drafter.bucket
    assert drafter.verified.count(0) > 80


def test_a_free_drafter_is_trusted_again_without_any_verification() -> None:
    session = AutoBudget().open(linear())
    drafter = Drafter(claim=0.9, milliseconds=0.02)
    play(drafter, session, [0] * 100)
    play(drafter, session, [8] * 60)
    assert sum(size >= 6 for size in drafter.verified[100:]) >= 15


def test_no_proposals_are_reported_separately_from_poor_ones() -> None:
    session = AutoBudget().open(linear())
    session.allowance(128)
    session.observe(Step(session.fit(DraftTree.empty(), 128), (), (5,), {"draft": 0.0}), 128)
    assert session.reason is None, "the report says that nothing was drafted"
    session.allowance(128)
    poor = session.fit(DraftTree.chain([1], "a", accept_prob=[0.01]), 128)
    session.observe(Step(poor, (), (5,), {}), 128)
    assert session.reason is not None and "save time" in session.reason
    session.allowance(128)
    good = session.fit(DraftTree.chain([1], "a", accept_prob=[0.9]), 128)
    session.observe(Step(good, (0,), (1, 5), {}), 128)
    assert session.reason is None, "a draft was verified"


def test_never_more_than_the_maximum_is_requested_or_preserved() -> None:
    session = AutoBudget(maximum=6).open(linear())
    drafter = Drafter(claim=1.0, milliseconds=0.0)
    play(drafter, session, [64] * 40)
    assert max(drafter.bucket) == 5
    assert len(session.fit(DraftTree.chain(list(range(20)), "a"), 128)) <= 5


def test_works_without_a_curve_and_without_times() -> None:
    session = AutoBudget().open(None)
    for _ in range(20):
        assert session.allowance(10) > 0
        tree = session.fit(DraftTree.chain([0, 1, 2], "a", accept_prob=[0.9, 0.8, 0.7]), 10)
        assert len(tree) == 3
        session.observe(Step(tree, (0, 1, 2), (0, 1, 2, 3), {}), 10)


def step(
    session: GoodputSession, expected_acceptance: float, spent: dict[str, float], draft: bool
) -> int:
    """Take a step that drafts nothing of use; returns the nodes that were asked for."""
    nodes = session.adviser.nodes(expected_acceptance, session.allowance(128))
    tree = DraftTree.chain([1], "a", accept_prob=[0.01]) if draft and nodes else DraftTree.empty()
    session.observe(Step(session.fit(tree, 128), (), (5,), spent), 128)
    return nodes


def test_a_step_at_a_poor_expected_acceptance_counts_as_one_without_a_draft() -> None:
    experience = Experience()
    session = GoodputSession(SETTINGS, experience, linear())
    spent = {"draft": 4.0, "verify": 10.0, "host": HOST}
    for _ in range(40):
        step(session, 0.05, spent, draft=False)
    known = list(experience.draft.sums)
    assert experience.draft.of(4) > 1.0
    assert [step(session, 0.05, {**spent, "draft": 9.0}, draft=False) for _ in range(9)] == [0] * 9
    assert experience.draft.sums == known
    assert step(session, 0.95, spent, draft=True), "another outlook is not to suffer for it"


def test_what_a_draft_adds_to_the_host_s_work_is_part_of_its_price() -> None:
    experience = Experience(host=0.3)
    session = GoodputSession(SETTINGS, experience, linear())
    for _ in range(60):
        session.allowance(128)
        tree = session.fit(DraftTree.chain([0, 1], "a", accept_prob=[0.9, 0.8]), 128)
        spent = {"draft": 0.1, "verify": 10.0}
        step = Step(tree, (0, 1), (0, 1, 2), spent)
        session.observe(step, 128)
        spent["host"] = 0.5  # as the loop does it: after the policy has learned
    assert experience.host == pytest.approx(0.3)
    assert experience.draft.of(64) == pytest.approx(0.3, rel=0.05)


def test_sources_pay_for_what_their_nodes_add_and_not_for_drafting_at_all() -> None:
    """A kernel for several rows is slower than that for one: only the first node costs much."""
    seconds = np.array([[0.005 if n == 1 else 0.009 + 0.0001 * n for n in ROWS]])
    tree = DraftTree.build([1, 2, 3, 4], [-1] * 4, "store", accept_prob=[0.9, 0.05, 0.04, 0.005])
    names = ("store", "model", "none")

    def gained(selected: tuple[int, int, int, int]) -> float:
        experience = Experience()
        experience.source("model").cost.learn(7, 0.4)
        gain = experience.source("model").gains[0]
        gain.passed = 10**6  # its trial is due
        session = GoodputSession(SETTINGS, experience, CostCurve((128,), seconds))
        session.allowance(128)
        fused = replace(tree, source=np.array(selected), sources=names)
        assert session.adviser.allowance("model", 8)
        session.adviser.appraise(replace(fused, accept_prob=np.full(4, 0.99, np.float32)), 0)
        session.adviser.spent("model", 0.4)
        verified = session.fit(replace(fused, accept_prob=np.full(4, 0.99, np.float32)), 128)
        assert len(verified) == 4
        session.observe(Step(verified, (), (9,), {"verify": 9.5}), 128)
        return gain.mean

    assert -0.1 < gained((0, 0, 1, 1)) < 0.0, "the tree would have been there without it"
    assert gained((1, 1, 1, 1)) < -0.7, "it drafted alone"
    assert gained((0, 0, 0, 0)) == 0.0
