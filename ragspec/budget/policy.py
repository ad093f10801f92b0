"""Budget policies: a fixed number of draft nodes, or one chosen by the clock."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

from ragspec.budget.base import Adviser, BudgetPolicy
from ragspec.budget.calibration import Calibration
from ragspec.budget.forward_cost import ForwardCost, SharedForward
from ragspec.budget.gains import BUCKETS, Experience
from ragspec.budget.goodput import GoodputSession, SourceChoice
from ragspec.errors import InputError, UnknownNameError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best


def make_budget(spec: int | str | BudgetPolicy) -> BudgetPolicy:
    """Return the policy for "auto" or a number of nodes; a policy is returned as it is.

    Raises:
        InputError: The number is below 0.
        UnknownNameError: The word is another.
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
    """A fixed number of nodes, those most likely to be accepted; 0 never drafts.

    Attributes:
        calibration: Correction of claims, shared by all sequences opened here, see `for_one_text`.
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

    def open(
        self, cost: ForwardCost | None = None, forward: SharedForward | None = None
    ) -> FixedSession:
        """Return the policy for one sequence; it ignores the cost."""
        return FixedSession(self.nodes, Adviser(self.calibration))


@dataclass(frozen=True, slots=True)
class FixedSession:
    """The same budget at every step."""

    nodes: int
    adviser: Adviser

    @property
    def reason(self) -> str | None:
        """Why speculation is off; None if it is on."""
        return None if self.nodes else "the budget is 0: plain decoding was asked for"

    def allowance(self, length: int) -> int:
        """Return the fixed number."""
        return self.nodes

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the nodes most likely to be accepted, at most the fixed number."""
        if len(tree) > self.nodes:
            tree = self.adviser.appraised(tree)
        return keep_best(tree, self.nodes)

    def observe(self, step: Step, length: int) -> None:
        """Learn how the drafters' claims fared."""
        self.adviser.learn(step.tokens)


def for_one_text(policy: BudgetPolicy) -> BudgetPolicy:
    """Return the policy for a text whose tokens depend on the drafts, as under relaxed rules.

    A fixed budget then learns from this text alone, so that equal seeds give equal texts. Policies
    that go by the clock stay as they are, and make no such promise.
    """
    if isinstance(policy, FixedBudget):
        return replace(policy, calibration=Calibration())
    return policy


class AutoBudget:
    """Chooses whether to draft and how much; all sequences opened here learn together.

    Args:
        margin: Share by which speculation must beat plain decoding to be used.
        probe_share: Share of the time that trials may take while speculation is off.
        maximum: The largest number of nodes.

    Raises:
        InputError: A share is outside [0, 1) or the maximum below 1.
    """

    name = "auto"
    needs_cost = True

    def __init__(
        self, *, margin: float = 0.03, probe_share: float = 0.008, maximum: int = BUCKETS[-1]
    ) -> None:
        if not (0.0 <= margin < 1.0 and 0.0 <= probe_share < 1.0 and maximum >= 1):
            raise InputError(
                f"got margin={margin}, probe_share={probe_share}, maximum={maximum}; expected "
                "shares in [0, 1) and at least one node. Use budget=0 for plain decoding."
            )
        self.margin, self.probe_share, self.maximum = margin, probe_share, maximum
        self.experience = Experience()
        self._cost: ForwardCost | None = None

    def open(
        self, cost: ForwardCost | None = None, forward: SharedForward | None = None
    ) -> GoodputSession:
        """Return the policy for one sequence, which learns the cost of forwards."""
        cost = self._cost = cost or self._cost or ForwardCost()
        adviser = SourceChoice(self.experience, self.probe_share, self.maximum)
        return GoodputSession(
            adviser, self.experience, self.margin, cost, forward or SharedForward()
        )
