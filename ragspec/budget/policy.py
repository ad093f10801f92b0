"""Budget policies: how many draft nodes a step takes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ragspec.budget.base import Adviser, BudgetPolicy, Settings
from ragspec.budget.calibration import Calibration
from ragspec.budget.cost_curve import CostCurve, SharedCost
from ragspec.budget.gains import BUCKETS, Experience
from ragspec.budget.tree_size import GoodputSession
from ragspec.errors import InputError, UnknownNameError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best


def make_budget(spec: int | str | BudgetPolicy) -> BudgetPolicy:
    """Return the policy for "auto" or a number of nodes; a policy is returned as it is.

    Raises InputError for a number below 0, UnknownNameError for any other word.
    """
    if isinstance(spec, str) and spec.strip().lstrip("-").isdecimal():
        spec = int(spec)
    if isinstance(spec, int) and not isinstance(spec, bool):
        return FixedBudget(spec)
    if spec == "auto":
        return AutoBudget()
    if isinstance(spec, BudgetPolicy):
        return spec
    raise UnknownNameError(
        f"got budget {spec!r}, expected 'auto' or a number of draft nodes (0 = plain decoding)."
    )


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Always the same number of nodes, the ones of largest reach; 0 never drafts.

    calibration: how far claims are believed, shared by all rows opened here, see `for_one_text`.
    """

    nodes: int
    needs_cost: ClassVar[bool] = False
    calibration: Calibration = field(default_factory=Calibration, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise InputError(
                f"got a budget of {self.nodes} draft nodes, expected 0 or more. Use 0 for plain "
                "decoding or 'auto'."
            )

    @property
    def name(self) -> str:
        """The name by which the policy is reported."""
        return f"fixed-{self.nodes}"

    def open(self, cost: CostCurve | SharedCost | None) -> FixedSession:
        """Return the policy for one row; the cost does not matter to it."""
        return FixedSession(self.nodes, Adviser(self.calibration))


@dataclass(frozen=True, slots=True)
class FixedSession:
    """The same budget at every step."""

    nodes: int
    adviser: Adviser

    @property
    def reason(self) -> str | None:
        """Why speculation is off: it was asked to be."""
        return None if self.nodes else "the budget is 0: plain decoding was asked for"

    def allowance(self, length: int) -> int:
        """Return the fixed number."""
        return self.nodes

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the nodes of largest reach, at most the fixed number of them."""
        if len(tree) > self.nodes:
            tree = self.adviser.appraised(tree)
        return keep_best(tree, self.nodes)

    def observe(self, step: Step, length: int) -> None:
        """Count what became of the claims."""
        self.adviser.learn(step.tokens)


def for_one_text(policy: BudgetPolicy) -> BudgetPolicy:
    """Return the policy for a text whose tokens hang on what is drafted, as under relaxed rules.

    What other texts taught must not reach it, so a fixed number of nodes is chosen by what this
    text alone tells, and equal seeds give equal texts. Policies that go by the clock stay as they
    are, and make no such promise.
    """
    if isinstance(policy, FixedBudget):
        return replace(policy, calibration=Calibration())
    return policy


class AutoBudget:
    """Chooses the size of every draft, and whether to draft at all.

    margin: share by which speculation must be better than plain decoding to be taken up.
    probe_share: share of the time that may be lost to trying again while it is off.
    maximum: the most nodes ever asked for. What is learned is shared by all rows opened here.
    """

    name = "auto"
    needs_cost = True

    def __init__(
        self, *, margin: float = 0.03, probe_share: float = 0.008, maximum: int = BUCKETS[-1]
    ) -> None:
        """Raises InputError for a share outside [0, 1) or a maximum below 1."""
        self.settings = Settings(margin, probe_share, maximum)
        self.experience = Experience()
        self._cost: CostCurve | None = None

    def open(self, cost: CostCurve | SharedCost | None) -> GoodputSession:
        """Return the policy for one row; the curve is refined by what is measured.

        Rows that share forwards are given a `SharedCost`."""
        curve = cost.curve if isinstance(cost, SharedCost) else cost
        self._cost = self._cost or curve or CostCurve.assumed()
        return GoodputSession(self.settings, self.experience, cost or self._cost)
