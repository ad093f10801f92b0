"""Policies by name, what a fixed one keeps, and rows that share a forward."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.cost_curve import ROWS, CostCurve, SharedCost, SharedForward
from ragspec.budget.gains import BUCKETS
from ragspec.budget.policy import AutoBudget, FixedBudget, make_budget
from ragspec.budget.tree_size import GoodputSession, fit_together
from ragspec.errors import InputError, UnknownNameError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree


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


def test_a_forward_teaches_once_and_at_its_width() -> None:
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
