"""The simulated machine: what it shows a policy, and what it counts."""

from __future__ import annotations

import numpy as np
import pytest

from ragspec.acceptance.base import Step
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.cost_line import ROWS
from ragspec.budget.policy import AutoBudget
from ragspec.budget.shared_forward import SharedCost
from ragspec.budget.tree_size import GoodputSession
from ragspec.drafters import fuse
from ragspec.drafters.base import DraftContext, DraftRequest
from ragspec.pipelines.bench.clock import Disturbance, Guesser, Machine, Priced
from ragspec.pipelines.bench.replay import Known, Replay
from ragspec.retrievers.methods.context import ContextDrafter
from ragspec.trees.draft_tree import DraftKind, DraftTree
from tests.support.fixed import FixedDrafter

TRUTH = CostCurve((128,), [np.interp(ROWS, (1, 2, 64), (0.010, 0.011, 0.020))])
TEXT = tuple(range(2, 402))
PROMPT = (1, 2)


def test_a_quiet_machine_shows_what_things_take() -> None:
    machine = Machine(TRUTH)
    assert machine.belief.seconds(1, 128) == pytest.approx(0.010)
    assert machine.belief.seconds(64, 128) == pytest.approx(0.020)
    assert machine.quiet == 0.0, "measuring at start-up is not counted"
    began = machine()
    assert machine.forward(2, 128) == pytest.approx(0.011)
    assert machine.spend(0.5) == pytest.approx(0.5)
    assert machine() - began == pytest.approx(machine.quiet) == pytest.approx(0.511)


@pytest.mark.parametrize(
    ("disturbance", "low", "high"),
    [
        (Disturbance(noise=0.2), 0.98, 1.06),
        (Disturbance(outliers=0.02), 1.05, 1.18),
        (Disturbance(steal=0.5), 1.25, 1.42),
        (Disturbance(slice=0.004), 1.9, 2.1),
    ],
)
def test_a_disturbed_one_shows_more_and_counts_the_same(
    disturbance: Disturbance, low: float, high: float
) -> None:
    machines = [Machine(TRUTH, disturbance, belief=TRUTH, seed=seed) for seed in (1, 1, 2)]
    seen = [[machine.spend(0.01) for _ in range(10_000)] for machine in machines]
    assert seen[0] == seen[1] != seen[2]
    for machine in machines:
        assert machine.quiet == pytest.approx(100.0)
        assert low < machine.now / machine.quiet < high


def test_slices_hit_short_work_seldom_and_hard() -> None:
    machine = Machine(TRUTH, Disturbance(slice=0.004), belief=TRUTH)
    seen = [machine.spend(0.0001) for _ in range(4000)]
    assert 0.015 < np.mean(np.array(seen) > 0.0001) < 0.035
    assert max(seen) > 0.004


def test_fusions_read_its_clock_and_no_other_after_it() -> None:
    machine = Machine(TRUTH, belief=TRUTH)

    def read() -> object:
        return vars(fuse)["perf_counter"]

    wall = read()
    with machine.clock():
        assert read() is machine
    assert read() is wall is not machine


def test_drafts_take_their_price_and_teaching_its_own_at_every_step() -> None:
    machine = Machine(TRUTH, belief=TRUTH)
    priced = Priced(FixedDrafter([4, 5]), machine, 0.001, 0.0002, teach=0.0005)
    session = priced.open(DraftRequest(PROMPT, 20))
    assert not hasattr(session, "outlook")
    assert len(session.propose(DraftContext([1, 2, 3], 2, 9), 2)) == 2
    assert machine.quiet == pytest.approx(0.0014)
    session.observe(Step(DraftTree.empty(), (), (3,)))
    assert machine.quiet == pytest.approx(0.0019)
    told = Priced(ContextDrafter(), machine, 0.0).open(DraftRequest(PROMPT, 20))
    assert told.outlook(DraftContext([1, 2, 1], 2, 9)) > 0.0  # type: ignore[attr-defined]


def test_a_guesser_is_right_as_often_as_it_should_be_and_claims_too_much() -> None:
    guesser = Guesser({PROMPT: TEXT}, 0.6)
    session = guesser.open(DraftRequest(PROMPT, 500))
    right, claims = [], []
    for index in range(len(TEXT) - 1):
        context = DraftContext([*PROMPT, *TEXT[:index]], len(PROMPT), 50)
        tree = session.propose(context, 1)
        assert tree.kind is DraftKind.COUPLED
        right.append(int(tree.tokens[0]) == TEXT[index])
        claims.append(float(tree.reach[0]))
    assert np.mean(right) == pytest.approx(0.6, abs=0.06)
    assert np.mean(claims) > 0.65
    assert np.corrcoef(right, claims)[0, 1] > 0.1
    assert len(session.propose(DraftContext(list(PROMPT), 2, 4), 9)) == 3
    by_prompt = Guesser({PROMPT: TEXT, (7,): TEXT}, {PROMPT: 0.0, (7,): 1.0})
    for prompt, expected in ((PROMPT, 3), ((7,), 2)):
        opened = by_prompt.open(DraftRequest(prompt, 500))
        assert opened.propose(DraftContext(list(prompt), len(prompt), 50), 1).tokens[0] == expected


def test_a_policy_is_told_the_times_of_draft_forward_and_host() -> None:
    told: list[dict[str, float]] = []

    class Listening(AutoBudget):
        def open(self, cost: CostCurve | SharedCost | None) -> GoodputSession:
            assert cost is machine.belief
            session = super().open(cost)
            learn = session.observe

            def observe(step: Step, length: int) -> None:
                told.append(step.milliseconds)
                learn(step, length)

            session.observe = observe  # type: ignore[method-assign]
            return session

    machine = Machine(TRUTH, host=0.0003)
    drafter = Priced(Guesser({PROMPT: TEXT}, 0.9), machine, 0.001)
    replay = Replay(drafter, Listening(), 500, machine)
    steps = replay.play(Known(PROMPT, TEXT[:64]))
    assert len(told) == steps - 1, "a text that has ended teaches nothing"
    assert {name for each in told for name in each} == {"draft", "verify", "commit", "host"}
    assert all(each["host"] == pytest.approx(0.3) for each in told)
    assert any(each["draft"] == pytest.approx(1.0) for each in told)
    assert machine.quiet > steps * 0.0103


def test_equal_seeds_give_equal_seconds() -> None:
    def seconds(seed: int) -> float:
        machine = Machine(TRUTH, Disturbance(noise=0.5, steal=0.5), seed=seed)
        drafter = Priced(Guesser({PROMPT: TEXT}, 0.45), machine, 0.001, 0.001)
        Replay(drafter, AutoBudget(), 500, machine).play(Known(PROMPT, TEXT))
        return machine.quiet

    assert seconds(1) == seconds(1) != seconds(2)
