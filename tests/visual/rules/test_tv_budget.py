"""A budget holds in every run, bounds the distribution of the image, and sets the label."""

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import limit_depth
from ragspec.visual.rules.lantern import GSD, Lantern, RelaxedWalk
from ragspec.visual.rules.tv_budget import TVBudget
from tests.support.codes import coupled, fixed, sampled
from tests.support.distributions import Distributions, DistributionTarget, Grow, emitted
from tests.support.enumeration import Tokens, enumerate_outcomes
from tests.visual.rules.test_lantern import CODES, PARTITION, TABLE


def draw_picture(
    rule: RelaxedWalk, distributions: Distributions, noise: NoiseStream, tree: Grow, length: int
) -> tuple[Tokens, tuple[float, ...], str]:
    """Return the codes of a picture, each one's excess, and the label."""
    row = rule.open()
    codes: Tokens = ()
    excess: tuple[float, ...] = ()
    while len(codes) < length:
        draft = limit_depth(tree(distributions, noise, codes), length - len(codes) - 1)
        verdict = row.judge(draft, DistributionTarget(distributions, draft, codes, noise))
        codes, excess = (*codes, *emitted(draft, verdict)), (*excess, *verdict.excess)
    return codes[:length], excess[:length], row.label


def enumerated(
    rule: RelaxedWalk, distributions: Distributions, tree: Grow, length: int
) -> tuple[float, float]:
    """Return the total variation of the image, and the largest sum of its excess."""
    pictures: defaultdict[Tokens, float] = defaultdict(float)

    def run(noise: NoiseStream) -> Any:
        codes, excess, _ = draw_picture(rule, distributions, noise, tree, length)
        return codes, sum(excess)

    most = 0.0
    outcomes: Any = enumerate_outcomes(run)
    for (codes, excess), weight in outcomes.items():
        pictures[codes] += weight
        most = max(most, excess)
    return distributions.variation(dict(pictures), length), most


@pytest.mark.parametrize("budget", [0.02, 0.1, TVBudget(0.1, positions=3), 0.5])
@pytest.mark.parametrize("tree", [fixed(2, 1), fixed(1, 1, 1)])
def test_a_budget_holds_for_every_picture_and_their_distribution(budget: Any, tree: Grow) -> None:
    total = budget.total if isinstance(budget, TVBudget) else budget
    for rule in (Lantern(TABLE, delta=0.4, tv_budget=budget), GSD(PARTITION, tv_budget=budget)):
        real, most = enumerated(rule, Distributions(CODES, 3), tree, 3)
        assert most <= total + 1e-12
        assert real <= total + 1e-12
        assert real > 0.0
    without, _ = enumerated(Lantern(TABLE, delta=0.4), Distributions(CODES, 3), tree, 3)
    assert without > 0.1


@pytest.mark.parametrize("tree", [fixed(3, 2), coupled(2, 1), sampled(2, 1)])
@pytest.mark.parametrize("total", [0.3, 1.0, 2.5])
def test_no_kind_of_draft_overspends(tree: Grow, total: float) -> None:
    spent = []
    for seed, positions in itertools.product(range(12), (None, 16)):
        rule = Lantern(TABLE, delta=0.5, tv_budget=TVBudget(total, positions))
        distributions, noise = Distributions(CODES, seed % 5), NoiseStream(seed)
        _, excess, _ = draw_picture(rule, distributions, noise, tree, 16)
        running = np.cumsum(excess)
        assert running[-1] <= total + 1e-12
        if positions is not None:
            assert (running <= total * np.arange(1, 17) / 16 + 1e-12).all()
        spent.append(running[-1])
    if tree(Distributions(CODES, 0), NoiseStream(0), ()).kind is DraftKind.COUPLED:
        assert {float(s) for s in spent} <= {0.0, 1.0, 2.0} and (max(spent) > 0.0) == (total >= 1.0)
    else:
        assert max(spent) > 0.5 * total


@pytest.mark.parametrize(
    ("tree", "total", "label"),
    [
        (fixed(2, 1), 0.25, "bounded(tv<=0.25)"),
        (fixed(2, 1), 0.0, "exact"),
        (fixed(2, 1), 1.0, "approximate"),  # a variation of 1 is no bound
        (coupled(2, 1), 0.25, "approximate"),
        (sampled(2, 1), 0.25, "approximate"),
    ],
)
def test_the_label_bounds_only_what_is_bounded(tree: Grow, total: float, label: str) -> None:
    rule = Lantern(TABLE, delta=0.3, tv_budget=total)
    assert draw_picture(rule, Distributions(CODES, 0), NoiseStream(1), tree, 6)[2] == label
    free = Lantern(TABLE, delta=0.3)
    assert "bounded" not in draw_picture(free, Distributions(CODES, 0), NoiseStream(1), tree, 6)[2]


def test_one_draft_of_another_kind_ends_the_bound() -> None:
    row = Lantern(TABLE, delta=0.3, tv_budget=0.2).open()
    distributions, noise = Distributions(CODES, 0), NoiseStream(0)
    for tree, label in [
        (DraftTree.empty(DraftKind.COUPLED), "exact"),
        (fixed(2)(distributions, noise, ()), "bounded(tv<=0.2)"),
        (replace(fixed(2)(distributions, noise, ()), kind=DraftKind.COUPLED), "approximate"),
        (fixed(2)(distributions, noise, ()), "approximate"),
    ]:
        row.judge(tree, DistributionTarget(distributions, tree, (), noise))
        assert row.label == label


@pytest.mark.parametrize("bad", [{"total": -0.1}, {"total": np.nan}, {"total": 1, "positions": 0}])
def test_wrong_budgets_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="expected"):
        TVBudget(**bad)
    with pytest.raises(InputError, match="tv_budget='much'; expected a number"):
        GSD(PARTITION, tv_budget="much")  # type: ignore[arg-type]
