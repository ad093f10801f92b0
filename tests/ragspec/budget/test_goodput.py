"""Whether to draft, which sources draft, and how much of a draft is verified."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.budget.forward_cost import SIZES, ForwardCost
from ragspec.budget.gains import BUCKETS, Gain
from ragspec.budget.goodput import MARGIN, AutoBudget, GoodputSession
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.ragspec.budget.test_calibration import chain
from tests.ragspec.budget.test_policy import linear, ready
from tests.ragspec.trees.test_operations import trees

HOST = 0.2
NONE = DraftTree.empty()
SURE = DraftTree.chain([1, 2], "context", accept_prob=[0.99, 0.98])
OTHER = DraftTree.chain([5, 6, 7], "model", accept_prob=[0.9, 0.8, 0.7])
PLAIN = 10.0


def closed_sets(tree: DraftTree) -> list[tuple[int, ...]]:
    parents = tree.parents.tolist()
    sizes = range(len(tree) + 1)
    subsets = (each for n in sizes for each in itertools.combinations(range(len(tree)), n))
    return [each for each in subsets if all(parents[i] in (-1, *each) for i in each)]


@given(trees(least=1, most=7), st.floats(0.05, 6.0))
def test_no_closed_set_of_nodes_gives_more_tokens_for_its_time(tree: DraftTree, row: float) -> None:
    cost = linear(row=row)
    session = ready(AutoBudget(), cost)
    accept_prob: list[float] = tree.accept_prob.tolist()

    def ratio(chosen: tuple[int, ...]) -> float:
        time = 1000 * cost.seconds(len(chosen) + 1, 128)
        return (1.0 + sum(accept_prob[i] for i in chosen)) / time

    selected = tuple(session.fit(tree).origin[:, 1].tolist())
    sizes = {*BUCKETS, len(tree)}
    best = max(ratio(chosen) for chosen in closed_sets(tree) if len(chosen) in sizes)
    assert selected in closed_sets(tree)
    if selected or best > (1.0 + MARGIN) * ratio(()):
        assert ratio(selected) == pytest.approx(best, rel=1e-6)


def test_a_sure_token_is_verified_despite_a_high_average_rate() -> None:
    """After a quotation of many tokens a step, a plain step still yields one token."""
    session = AutoBudget().open(linear(base=5.5, row=2.0))
    session.experience.learn_step(15.0, 12.0)
    session.allowance(128)
    assert len(session.fit(DraftTree.chain([1], "a", accept_prob=[0.9]))) == 1


@pytest.mark.parametrize("row", [(0.1, 1.3), (1.3, 2.5), (2.5, 8.0)])
def test_costlier_verification_never_gets_a_larger_tree(row: tuple[float, float]) -> None:
    tree = chain(16, 0.85)
    sizes = []
    for each in row:
        session = ready(AutoBudget(), linear(row=each))
        verified = session.fit(tree)
        sizes.append(len(verified))
        # The learned gain is less the price of the nodes' time.
        assert not len(verified) or session.gain.mean < 0.95 * float(verified.accept_prob.sum())
    assert sizes[0] > sizes[1]


def test_one_slow_trial_hardly_changes_the_time_of_a_trial() -> None:
    gain = Gain()
    for milliseconds in (1.0, 1000.0):
        gain.learn_cost(milliseconds)
    assert gain.cost < 1.2


def test_a_drafter_of_empty_trees_is_paused() -> None:
    session, requests = AutoBudget().open(linear()), list[int]()
    for _ in range(20):
        requests.append(session.nodes(None, session.allowance(128)))
        session.fit(NONE)
        spent = {"draft": 5.0 if requests[-1] else 0.0, "verify": PLAIN, "host": HOST}
        session.observe(Step(NONE, (), (5,), spent))
    assert requests[0] > 0 == requests[-1]


class Drafter:
    """Proposes chains of a fixed claim; the test decides how many tokens are right."""

    def __init__(
        self, claim: float, milliseconds: float, policy: AutoBudget | None = None, row: float = 0.4
    ) -> None:
        self.claim, self.milliseconds = claim, milliseconds
        self.session = (policy or AutoBudget()).open(linear(row=row))
        self.requests: list[int] = []
        self.verified: list[int] = []

    def step(self, right: int, expected: float | None = None) -> float:
        """Take one step of which `right` tokens can be accepted; returns its milliseconds."""
        session = self.session
        allowed = session.nodes(expected, session.allowance(128))
        self.requests.append(allowed)
        tree = session.fit(chain(allowed, self.claim))
        self.verified.append(len(tree))
        accepted = min(right, len(tree))
        token = accepted if accepted < right else 99
        spent = {"verify": PLAIN + 0.4 * len(tree), "commit": 0.0, "host": HOST}
        spent["draft"] = self.milliseconds if allowed else 0.0
        session.observe(Step(tree, tuple(range(accepted)), (*range(accepted), token), spent))
        return sum(spent.values())

    def play(self, rights: list[int]) -> float:
        """Take a step for each number of right tokens; return the milliseconds spent."""
        return sum(map(self.step, rights))


def test_switches_off_for_a_useless_drafter_and_on_when_it_becomes_useful() -> None:
    drafter = Drafter(claim=0.9, milliseconds=5.0)
    drafter.play([0] * 120)
    assert drafter.requests[-40:].count(0) >= 36
    while drafter.requests[-1]:
        drafter.play([0])
    drafter.play([8] * 400)
    assert all(request > 0 for request in drafter.requests[-20:])
    assert drafter.session.reason is None


@pytest.mark.parametrize("milliseconds", [0.05, 0.5, 2.0, 5.0, 50.0])
def test_the_time_lost_to_a_useless_drafter_is_bounded(milliseconds: float) -> None:
    policy, plain = AutoBudget(), PLAIN + HOST

    def play(steps: int) -> float:
        return Drafter(0.9, milliseconds, policy).play([0] * steps)

    first = play(500)
    assert first <= 1.01 * 500 * plain + 12 * (plain + milliseconds)
    lengths = [96, 500, *[96] * 20]  # the sequences share what trials may cost
    later = sum(map(play, lengths))
    assert later <= 1.01 * sum(lengths) * plain + plain + milliseconds


def test_a_free_drafter_is_trusted_again_without_any_verification() -> None:
    drafter = Drafter(claim=0.9, milliseconds=0.001)
    drafter.play([0] * 100)
    assert drafter.verified[-30:] == [0] * 30 and all(drafter.requests)
    drafter.play([8] * 60)
    assert sum(size >= 6 for size in drafter.verified[100:]) >= 15


def test_long_copies_get_the_largest_drafts_and_short_ones_small_drafts() -> None:
    drafter = Drafter(claim=0.99, milliseconds=0.1, row=0.05)
    drafter.play([64] * 40)
    assert drafter.requests[-1] == BUCKETS[-1] == 63
    assert max(drafter.requests) == drafter.session.allowance(128) == 63
    drafter.play([0] * 200)
    assert max(drafter.requests[-20:]) <= 15


def test_gains_are_separate_by_expected_acceptance() -> None:
    drafter = Drafter(claim=0.9, milliseconds=2.0)
    for _ in range(80):
        drafter.step(0, expected=0.05)
    assert drafter.requests[-20:].count(0) >= 18
    for _ in range(60):
        drafter.step(8, expected=0.95)
    assert all(drafter.requests[-20:])


def test_no_proposals_are_reported_separately_from_poor_ones() -> None:
    session = ready(AutoBudget(), linear())
    session.observe(Step(session.fit(DraftTree.empty()), (), (5,), {"draft": 0.0}))
    assert session.reason is None, "the report says that nothing was drafted"
    session.allowance(128)
    poor = session.fit(DraftTree.chain([1], "a", accept_prob=[0.01]))
    session.observe(Step(poor, (), (5,), {}))
    assert session.reason is not None and "save time" in session.reason
    session.allowance(128)
    good = session.fit(DraftTree.chain([1], "a", accept_prob=[0.9]))
    session.observe(Step(good, (0,), (1, 5), {}))
    assert session.reason is None, "a draft was verified"


def test_works_without_costs_and_without_times() -> None:
    session = AutoBudget().open(None)
    for _ in range(20):
        assert session.allowance(10) > 0
        tree = session.fit(DraftTree.chain([0, 1, 2], "a", accept_prob=[0.9, 0.8, 0.7]))
        assert len(tree) == 3
        session.observe(Step(tree, (0, 1, 2), (0, 1, 2, 3), {}))


def ask(
    session: GoodputSession, before: DraftTree, after: DraftTree, tokens: tuple[int, ...], ms: float
) -> int:
    """Play a step of a first source and one that takes `ms`; return the nodes it may draft."""
    session.nodes(0.95, session.allowance(128))
    tree = session.appraise(before) if len(before) else before
    session.spent("context", 0.01)
    request = session.share("model", 32)
    if request:
        if len(after):
            tree = session.appraise(after)
        session.spent("model", ms)
    tree = session.fit(tree)
    session.observe(Step(tree, (), tokens, {}))
    return request


def opened(row: float = 0.01) -> GoodputSession:
    return AutoBudget().open(linear(row=row))


def test_a_costly_source_that_adds_nothing_is_asked_seldom() -> None:
    session = opened()
    requests = [ask(session, NONE, OTHER, (9, 9, 9), PLAIN) for _ in range(1000)]
    assert requests[0] == 32
    assert sum(map(bool, requests[20:])) <= 0.01 * 1000
    reason = f"{requests.count(0)} of its steps, as it costs more time than it saves"
    assert session.rested == {"model": reason}


def test_a_costly_source_that_pays_is_always_asked() -> None:
    session = opened()
    assert all(ask(session, NONE, OTHER, (5, 6, 7, 8), PLAIN) for _ in range(50))
    assert session.extra == PLAIN


def test_a_source_is_asked_only_where_the_others_promise_little() -> None:
    session = opened()
    for _ in range(120):
        ask(session, SURE, SURE, (1, 2, 3), PLAIN)
        ask(session, NONE, OTHER, (5, 6, 7, 8), PLAIN)
    assert [ask(session, SURE, SURE, (1, 2, 3), PLAIN) for _ in range(10)].count(0) >= 9
    assert all(ask(session, NONE, OTHER, (5, 6, 7, 8), PLAIN) for _ in range(10))


def test_a_source_that_proposes_nothing_gets_no_credit_for_the_next_one() -> None:
    session = opened(row=0.0)
    for _ in range(3):
        session.nodes(0.95, session.allowance(128))
        for source in ("silent", "failing", "model"):
            assert session.share(source, 32)
            if source == "model":
                session.appraise(OTHER)
            if source != "failing":  # a source that fails reports no time
                session.spent(source, PLAIN)
        session.observe(Step(NONE, (), (5, 6, 7, 8), {}))
    gains = [session.experience.gain(name, 0.0) for name in ("silent", "failing", "model")]
    assert [gain.mean for gain in gains] == [0.0, 0.0, 3.0]
    assert gains[1].trials == 0


def test_sources_pay_for_what_their_nodes_add_and_not_for_drafting_at_all() -> None:
    """A kernel for several positions is slower than that for one: the first node costs most."""
    tree = DraftTree.build([1, 2, 3, 4], [-1] * 4, "store", accept_prob=[0.99] * 4)

    def gained(selected: tuple[int, int, int, int]) -> float:
        cost = ForwardCost({n: 0.005 if n == 1 else 0.009 + 0.0001 * n for n in SIZES})
        session = AutoBudget().open(cost)
        fused = replace(tree, source=np.array(selected), sources=("store", "model", "none"))
        session.allowance(128)
        assert session.share("model", 8)
        session.appraise(fused)
        session.spent("model", 0.4)
        session.observe(Step(fused, (), (9,), {}))
        return session.experience.gain("model", 0.0).mean

    assert -0.1 < gained((0, 0, 1, 1)) < 0.0, "the tree would have been there without it"
    assert gained((1, 1, 1, 1)) < -0.7, "it drafted alone"
    assert gained((0, 0, 0, 0)) == 0.0
