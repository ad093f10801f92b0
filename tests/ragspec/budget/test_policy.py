from __future__ import annotations

import numpy as np
import pytest

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.cost_curve import ROWS, CostCurve
from ragspec.budget.policy import AutoBudget, FixedBudget, make_budget
from ragspec.errors import InputError, UnknownNameError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree


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
