"""Costs of drafts as lines, and gains as doubted means."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.cost_curve import ROWS, CostCurve, SharedCost, SharedForward
from ragspec.budget.gains import (
    BUCKETS,
    DOUBT,
    EXPECTED,
    FADING,
    PAUSE,
    DraftCost,
    Experience,
    Gain,
    SizedGain,
)
from ragspec.budget.policy import AutoBudget, FixedBudget, make_budget
from ragspec.budget.tree_size import GoodputSession, fit_together
from ragspec.errors import InputError, UnknownNameError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree

LARGEST = len(BUCKETS) - 1


def test_draft_cost_finds_the_line() -> None:
    cost = DraftCost()
    for i in range(60):
        nodes = (4, 8, 16)[i % 3]
        cost.learn(nodes, 0.5 + 0.2 * nodes)
    assert cost.call == pytest.approx(0.5, abs=0.1)
    assert cost.node == pytest.approx(0.2, abs=0.01)
    assert cost.of(8) == pytest.approx(2.1, rel=0.05)


def test_half_of_the_cost_goes_with_the_nodes_until_sizes_have_varied() -> None:
    cost = DraftCost()
    for _ in range(10):
        cost.learn(8, 2.0)
    assert (cost.call, cost.node) == pytest.approx((1.0, 0.125))
    for i in range(30):
        cost.learn((8, 2)[i % 2], 2.0)
    assert cost.node < 0.04
    assert cost.of(4) == pytest.approx(2.0, rel=0.05)


def test_draft_cost_is_not_moved_far_by_an_outlier() -> None:
    cost = DraftCost()
    for _ in range(20):
        cost.learn(8, 1.0)
    cost.learn(8, 1000.0)
    assert cost.of(8) < 1.2


def test_a_first_time_that_was_an_outlier_does_not_stay() -> None:
    cost = DraftCost()
    for milliseconds in (40.0, 4.0, 4.0):
        cost.learn(8, milliseconds)
    assert cost.of(8) < 10.0
    steady = DraftCost()
    for i in range(20):
        steady.learn(8, (3.0, 6.0)[i % 2])  # nothing unusual: all count
    assert steady.of(8) == pytest.approx(4.5, rel=0.05)


def test_a_cost_follows_from_its_sums() -> None:
    cost = DraftCost()
    assert cost.of(64) == 0.0
    for nodes in (8, 8, 4, 64, 8):
        cost.learn(nodes, 1.0)
        assert DraftCost(cost.sums) == cost


def tried(share: float, tokens: float, price: float, steps: int = 2000) -> float:
    """How often something is tried that brings `tokens` in a share of the steps."""
    gain, chance, times = Gain(), random.Random(0), 0
    for _ in range(steps):
        if not gain.known or gain.mean + gain.doubt > price or gain.due(price, 0.02):
            times += 1
            gain.learn(tokens if chance.random() < share else 0.0)
    return times / steps


def test_uneven_gains_are_not_dropped_for_some_misses() -> None:
    assert tried(0.35, 1.0, 0.2) > 0.5
    assert tried(0.1, 1.0, 0.2) < 0.12
    assert tried(0.0, 1.0, 0.2) < 0.06


def test_doubt_is_a_share_of_the_error_of_the_mean() -> None:
    gain = Gain()
    for tokens in (0.0, 2.0, 0.0, 2.0):
        gain.learn(tokens)
    assert (gain.mean, gain.doubt) == pytest.approx((1.0, DOUBT * math.sqrt(1.0 / 4)))
    for _ in range(400):
        gain.learn(0.0)
        gain.learn(2.0)
    assert gain.mean == pytest.approx(1.0, abs=2 * FADING)
    assert gain.doubt == pytest.approx(DOUBT * math.sqrt(FADING / (2 - FADING)), rel=0.01)


@pytest.mark.parametrize(("price", "share"), [(0.1, 0.01), (1.0, 0.02), (0.004, 0.01)])
def test_trials_cost_their_share_of_the_time(price: float, share: float) -> None:
    gain = Gain()
    times = sum(gain.due(price, share) for _ in range(5000))
    assert times == pytest.approx(min(5000, 5000 * share / (PAUSE * price)), rel=0.1)
    assert not any(gain.due(price, 0.0) for _ in range(5000)), "without a share there are none"


def line(call: float, node: float) -> DraftCost:
    cost = DraftCost()
    for i in range(80):
        cost.learn((2, 8, 32)[i % 3], call + node * (2, 8, 32)[i % 3])
    return cost


def test_as_much_is_requested_as_pays_for_its_drafting() -> None:
    gain = SizedGain()
    for _ in range(100):
        gain.learn_sizes([0.0, 0.8, 1.4, 1.9, 2.3, 2.9, 3.2], 6)
    sizes = [BUCKETS[gain.best(line(0.1, node), 0.2, 6)[0]] for node in (0.01, 0.5, 1.3, 9.0)]
    assert sizes == sorted(sizes, reverse=True)
    assert (sizes[0], sizes[-1]) == (11, 1)
    _, cheap = gain.best(line(0.1, 0.01), 0.2, 6)
    _, dear = gain.best(line(20.0, 0.01), 0.2, 6)
    assert cheap > 2.5 > 0.0 > dear


def test_a_cold_start_asks_for_a_sensible_size_where_cost_allows() -> None:
    assert BUCKETS[SizedGain().best(line(0.05, 0.005), 0.2, LARGEST)[0]] >= 11
    assert 2 <= BUCKETS[SizedGain().best(line(0.1, 0.5), 0.2, LARGEST)[0]] <= 5


def test_gains_of_sizes_fall_where_they_add_nothing_and_rise_at_the_edge() -> None:
    gain = SizedGain()
    for _ in range(100):
        gain.learn_sizes([-1.0, -0.5, -0.4, -0.6, -0.8], 2)
    assert gain.added[1:5] == pytest.approx([0.5, 0.1, 0.0, 0.0], abs=0.01)
    assert gain.added[5:] == list(EXPECTED[5:]), "what was not asked for is not known"
    assert gain.mean == pytest.approx(0.6)
    for _ in range(60):
        gain.learn_sizes([-1.0, 0.0, 1.0, 2.0, 3.0], 4)
    assert gain.added[5] == pytest.approx(0.5 * gain.added[4])
    assert gain.added[4] > 0.6


def test_the_host_s_time_is_clipped_and_the_first_steps_weigh_as_in_a_mean() -> None:
    experience = Experience()
    for milliseconds in (0.3, 0.3, 300.0):
        experience.learn_host(milliseconds)
    assert experience.host < 0.4
    for tokens in (1, 3):
        experience.learn_step(tokens, 10.0)
    assert (experience.tokens, experience.time) == (2.0, 10.0)


def curve() -> CostCurve:
    return CostCurve((128,), np.array([[(10 + 0.4 * (n - 1)) / 1000 for n in ROWS]]))


def run(session: BudgetSession, seed: int, steps: int, slow: float = 1.0) -> list[int]:
    """Feed a session random proposals and outcomes; return the sizes that it chose."""
    random = np.random.default_rng(seed)
    sizes = []
    for _ in range(steps):
        allowed = session.allowance(128)
        chances = random.uniform(0.0, 1.0, allowed)
        claims = np.cumprod(chances)
        right = int(np.cumprod(random.random(allowed) < chances).sum())
        tree = DraftTree.empty()
        if allowed:
            proposal = DraftTree.chain(list(range(allowed)), "a", accept_prob=claims.tolist())
            tree = session.fit(proposal, 128)
        accepted = min(right, len(tree))
        spent = {"draft": 0.1 * slow, "verify": (10 + 0.4 * len(tree)) * slow, "host": 0.2}
        step = Step(tree, tuple(range(accepted)), (*range(accepted), 99), spent)
        session.observe(step, 128)
        sizes.append(len(tree))
    return sizes


@pytest.mark.parametrize("spec", [5, "5", " 5 "])
def test_a_number_is_a_fixed_budget(spec: int | str) -> None:
    policy = make_budget(spec)
    assert policy == FixedBudget(5)
    assert policy.name == "fixed-5"
    assert not policy.needs_cost


def test_auto_and_ready_created_policies() -> None:
    auto = make_budget("auto")
    assert isinstance(auto, AutoBudget) and auto.needs_cost
    assert make_budget(auto) is auto
    assert isinstance(auto, BudgetPolicy)


@pytest.mark.parametrize("spec", ["automatic", "", "1.5", "profile.json", None, True, 2.5])
def test_other_words_are_refused(spec: object) -> None:
    with pytest.raises(UnknownNameError, match="expected 'auto'"):
        make_budget(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", [-1, "-3"])
def test_a_negative_budget_is_refused(spec: int | str) -> None:
    with pytest.raises(InputError, match="expected 0 or more"):
        make_budget(spec)


@pytest.mark.parametrize("options", [{"margin": -0.1}, {"probe_share": 1.0}, {"maximum": 0}])
def test_settings_out_of_range_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected shares"):
        AutoBudget(**options)  # type: ignore[arg-type]


def test_fixed_keeps_the_best_nodes_with_their_parents() -> None:
    tree = DraftTree.build([7, 8, 9, 6], [-1, -1, 1, 0], "a", accept_prob=[0.2, 0.7, 0.6, 0.1])
    session = FixedBudget(2).open(None)
    assert session.allowance(99) == 2
    small = session.fit(tree, 99)
    assert small.tokens.tolist() == [8, 9]
    assert small.parents.tolist() == [-1, 0]
    session.observe(Step(small, (), (3,)), 99)
    assert session.reason is None


def test_zero_is_plain_decoding_and_says_so() -> None:
    session = FixedBudget(0).open(None)
    assert session.allowance(1) == 0
    assert len(session.fit(DraftTree.chain([1, 2], "a"), 1)) == 0
    assert session.reason is not None and "asked for" in session.reason


def test_auto_learns_from_one_row_for_the_next() -> None:
    policy = AutoBudget()
    run(policy.open(curve()), 0, 60)
    assert policy.experience.calibration.tables["a"]
    assert policy.experience.steps == 59, "the times of the last are not known"
    assert policy.open(curve()).experience is policy.experience


def linear(base: float = 10.0, row: float = 0.4) -> CostCurve:
    """A forward of `base` ms and `row` ms more for each further position."""
    return CostCurve((128,), np.array([[(base + row * (n - 1)) / 1000 for n in ROWS]]))


def chain(count: int, chance: float) -> DraftTree:
    accept_prob = [chance ** (depth + 1) for depth in range(count)]
    return DraftTree.chain(list(range(count)), "a", accept_prob=accept_prob)


def ready(policy: AutoBudget, cost: SharedCost) -> GoodputSession:
    session = policy.open(cost)
    session.adviser.nodes(None, session.allowance(128))
    session.adviser.bucket = len(BUCKETS) - 1
    return session


def fitted(chances: list[float], row: float = 0.4) -> list[int]:
    """Return how many nodes of each row's chain of 23 are kept; a chance of 0: it has no draft."""
    forward, policy = SharedForward(), AutoBudget(margin=0.0)
    forward.begin(len(chances))
    cost = SharedCost(linear(row=row), forward)
    sessions = [ready(policy, cost) for _ in chances]
    trees = [chain(23, chance) if chance else DraftTree.empty() for chance in chances]
    return [len(tree) for tree in fit_together(sessions, trees, [128] * len(chances))]


@pytest.mark.parametrize("row", [0.1, 0.4, 1.5])
@pytest.mark.parametrize("chances", [[0.9, 0.9], [0.97, 0.0, 0.0, 0.0], [0.95, 0.6, 0.3, 0.0, 0.9]])
def test_no_width_gives_more_tokens_for_the_time_of_the_whole_forward(
    chances: list[float], row: float
) -> None:
    alive = len(chances)

    def draft_cost(width: int) -> float:
        tokens = alive + sum(sum(p ** (d + 1) for d in range(width)) for p in chances)
        line = linear(row=row).batched(alive).line(128)
        return tokens / line.at(width + 1)

    sizes = [size for size in BUCKETS if size <= 23]
    best = max(sizes, key=draft_cost)
    assert fitted(chances, row) == [best if chance else 0 for chance in chances]


def test_a_draft_pays_for_the_rows_beside_it() -> None:
    """A row that drafts alone widens the forward of all, so it drafts less the more there are."""
    selected = [fitted([0.9] + [0.0] * others)[0] for others in range(8)]
    assert selected[0] > selected[-1]
    assert all(more >= fewer for more, fewer in itertools.pairwise(selected))
    together = fitted([0.9] * 8)[0]
    assert selected[-1] < together <= selected[0]


def test_other_policies_decide_for_themselves() -> None:
    forward = SharedForward()
    cost = SharedCost(linear(row=9.0), forward)
    trees = [chain(9, 0.9), chain(9, 0.9), chain(0, 0.9)]
    budgets: list[BudgetSession | None]
    budgets = [FixedBudget(5).open(None), ready(AutoBudget(), cost), None]
    assert [len(tree) for tree in fit_together(budgets, trees, [1, 1, 1])] == [5, 0, 0]


def test_a_forward_teaches_once_and_at_its_its_width() -> None:
    curve, forward = linear(), SharedForward()
    cost = SharedCost(curve, forward)
    forward.begin(4)
    expected = cost.line(128)
    assert expected == curve.batched(4).line(128) != curve.line(128)
    forward.widen(8)
    for current in (8, 2, 1, 1):
        cost.refine(current, 128, 1.2 * expected.at(8))
    once = linear().batched(4)
    once.refine(8, 128, 1.2 * expected.at(8))
    assert cost.line(128) == once.line(128) != expected
    assert curve.line(128) == linear().line(128), "what four rows cost says nothing of one"


def test_times_of_all_rows_are_learned_as_those_of_one() -> None:
    """Eight rows take eight times the host and draft; what is learned serves one row as well."""
    results = []
    for alive in (1, 8):
        forward, policy = SharedForward(), AutoBudget()
        forward.begin(alive)
        session = ready(policy, SharedCost(linear(), forward))
        for _ in range(6):
            session.adviser.nodes(None, session.allowance(128))
            tree = session.fit(chain(7, 0.9), 128)
            forward.widen(1 + len(tree))
            spent = {"draft": 2.0 * alive, "host": 0.5 * alive, "verify": 12.0}
            session.observe(Step(tree, (), (5,), spent), 128)
        known = policy.experience
        results.append((known.host, known.draft.of(7)))
    assert results[0] == pytest.approx(results[1], rel=0.2)
