"""Policies by name, fixed budgets, and sequences that share a forward."""

import pytest

from ragspec.budget.base import BudgetPolicy, BudgetSession, FixedBudget
from ragspec.budget.forward_cost import SIZES, ForwardCost
from ragspec.budget.gains import BUCKETS
from ragspec.budget.goodput import AutoBudget, GoodputSession, fit_together, make_budget
from ragspec.errors import InputError, UnknownNameError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.ragspec.budget.test_calibration import chain


@pytest.mark.parametrize("spec", [5, "5", " 5 "])
def test_a_number_is_a_fixed_budget(spec: int | str) -> None:
    policy = make_budget(spec)
    assert policy == FixedBudget(5)
    assert policy.name == "fixed-5" and not policy.needs_cost


def test_auto_and_policy_objects() -> None:
    auto = make_budget("auto")
    assert isinstance(auto, AutoBudget) and auto.needs_cost
    assert make_budget(auto) is auto
    assert isinstance(auto, BudgetPolicy)


@pytest.mark.parametrize("spec", ["automatic", "", "1.5", "profile.json", None, True, 2.5])
def test_unknown_budgets_are_refused(spec: object) -> None:
    with pytest.raises(UnknownNameError, match="expected 'auto'"):
        make_budget(spec)  # type: ignore[arg-type]


def test_numbers_out_of_range_are_refused() -> None:
    for spec in (-1, "-3"):
        with pytest.raises(InputError, match="expected 0 or more"):
            make_budget(spec)


def test_fixed_keeps_the_best_nodes_with_their_parents() -> None:
    tree = DraftTree.build([7, 8, 9, 6], [-1, -1, 1, 0], "a", accept_prob=[0.2, 0.7, 0.6, 0.1])
    session = FixedBudget(2).open(None)
    assert session.allowance(99) == 2
    small = session.fit(tree)
    assert (small.tokens.tolist(), small.parents.tolist()) == ([8, 9], [-1, 0])
    session.observe(Step(small, (), (3,)))
    assert session.reason is None


def test_zero_is_plain_decoding_and_says_so() -> None:
    session = FixedBudget(0).open(None)
    assert session.allowance(1) == 0
    assert len(session.fit(DraftTree.chain([1, 2], "a"))) == 0
    assert session.reason is not None and "asked for" in session.reason


def linear(base: float = 10.0, row: float = 0.4, widths: tuple[int, ...] = ()) -> ForwardCost:
    """A forward of `base` ms and `row` ms more for each further position."""
    return ForwardCost({n: (base + row * (n - 1)) / 1000 for n in SIZES}, widths=widths)


def ready(policy: AutoBudget, cost: ForwardCost, rows: int = 1) -> GoodputSession:
    session = policy.open(cost)
    session.allowance(128, rows)
    return session


def fitted(chances: list[float], cost: ForwardCost, drafting: float = 0.0) -> list[int]:
    """Return the verified nodes of each sequence's chain of 23; a chance of 0: no draft.

    drafting: milliseconds of each sequence's draft.
    """
    policy = AutoBudget()
    policy.experience.gain("", None).cost = drafting
    sessions = [ready(policy, cost, len(chances)) for _ in chances]
    trees = [chain(23, chance) if chance else DraftTree.empty() for chance in chances]
    return [len(tree) for tree in fit_together(sessions, trees)]


@pytest.mark.parametrize(("row", "drafting"), [(0.1, 0.0), (0.4, 0.0), (1.5, 0.0), (1.5, 9.0)])
@pytest.mark.parametrize("chances", [[0.9, 0.9], [0.97, 0.0, 0.0, 0.0], [0.95, 0.6, 0.3, 0.0, 0.9]])
def test_the_likeliest_nodes_of_all_fill_the_best_number_of_positions(
    chances: list[float], row: float, drafting: float
) -> None:
    cost, drafts = linear(row=row), sum(chance > 0 for chance in chances)
    pooled = sorted((p ** (d + 1) for p in chances if p for d in range(23)), reverse=True)

    def goodput(nodes: int) -> float:
        tokens = len(chances) + sum(pooled[:nodes])
        spent = 1000 * cost.seconds(len(chances) + nodes, 128) + drafting * len(chances)
        return tokens / spent

    best = max((size * drafts for size in BUCKETS if size <= 23), key=goodput)
    sizes = fitted(chances, cost, drafting)
    assert sum(sizes) == best
    kept = sorted(p ** (d + 1) for p, n in zip(chances, sizes, strict=True) for d in range(n))
    assert kept == pytest.approx(sorted(pooled[:best]))


def test_a_padded_forward_gives_each_draft_the_same_room() -> None:
    assert len(set(fitted([0.97, 0.9, 0.8], linear(widths=(1, 4, 8, 16, 32, 64))))) == 1
    assert len(set(fitted([0.97, 0.9, 0.8], linear()))) == 3


def test_other_policies_decide_for_themselves() -> None:
    trees = [chain(9, 0.9), chain(9, 0.9), chain(0, 0.9)]
    budgets: list[BudgetSession | None]
    budgets = [FixedBudget(5).open(), ready(AutoBudget(), linear(row=9.0)), None]
    assert [len(tree) for tree in fit_together(budgets, trees)] == [5, 0, 0]


def test_sequences_report_the_time_of_their_forward_once() -> None:
    cost, once = linear(), linear()
    sessions = [AutoBudget().open(cost) for _ in range(4)]
    for _ in range(9):
        counts = [8, 2, 1, 1]
        for session in sessions:
            session.allowance(128, 4)
            session.counts = counts
        for session in sessions:
            session.observe(Step(DraftTree.empty(), (), (5,), {"verify": 20.0}))
        once.learn(12, 128, 0.02)
    assert cost.seconds(12, 128) == once.seconds(12, 128) == pytest.approx(0.02)


def test_times_of_all_sequences_are_learned_as_those_of_one() -> None:
    """Eight sequences take eight times the host and draft time of one."""
    results = []
    for rows in (1, 8):
        policy = AutoBudget()
        session = policy.open(linear())
        for _ in range(6):
            session.nodes(None, session.allowance(128, rows))
            tree = session.fit(chain(7, 0.9))
            session.counts = [1 + len(tree)] * rows
            spent = {"draft": 2.0 * rows, "host": 0.5 * rows, "verify": 12.0}
            session.observe(Step(tree, (), (5,), spent))
        results.append((policy.experience.host, session.gain.cost))
    assert results[0] == pytest.approx(results[1], rel=0.2)


def test_a_draft_must_pay_for_the_time_of_all_waiting_sequences() -> None:
    policy = AutoBudget()
    gain = policy.experience.gain("", None)
    for _ in range(5):
        gain.learn(0.5)
        gain.learn_cost(3.0)
    session = policy.open(linear())
    assert session.nodes(None, session.allowance(128)) > 0
    assert session.nodes(None, session.allowance(128, 4)) == 0


def test_a_cost_that_was_measured_again_replaces_the_last_one() -> None:
    policy, old, new = AutoBudget(), linear(), linear()
    assert [policy.open(each).cost for each in (old, new, None)] == [old, new, new]
