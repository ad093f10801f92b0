"""What a budget policy is: asked before each draft, shown each draft, told of each step.

It decides how much of a draft is verified, and its adviser which sources are asked. It never
changes the output, only its cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from ragspec.acceptance.base import Step
from ragspec.budget.cost_curve import CostCurve
from ragspec.trees.draft_tree import DraftTree


class Adviser:
    """Whom a drafter may ask while it proposes; this one believes every claim and asks everyone.

    rate: tokens per millisecond at present, the price of time; 0 where it is not known.
    """

    rate = 0.0

    @property
    def rested(self) -> Mapping[str, str]:
        """For how many steps of the text a source was left alone, and why."""
        return {}

    def nodes(self, outlook: float | None, budget: int) -> int:
        """Return how many nodes to draft in all, given how likely the best draft is; 0: none."""
        return budget

    def allowance(self, source: str, budget: int) -> int:
        """Return how many nodes to ask a source for, after the trees appraised so far."""
        return budget

    def appraise(self, tree: DraftTree, root: int) -> DraftTree:
        """Return a source's tree with the reach that it may be believed; root: the last token."""
        return tree

    def spent(self, source: str, milliseconds: float) -> None:
        """Note the time that a source took, which has been appraised if it proposed anything."""

    def rests(self, source: str) -> bool:
        """Return whether to leave a source alone for this text, as it does not pay to teach it."""
        return False

    def taught(self, source: str, milliseconds: float) -> None:
        """Note the time that it took to tell a source of a step."""


class BudgetSession(Protocol):
    """The policy for one row of text."""

    chosen: dict[int, int]

    @property
    def adviser(self) -> Adviser:
        """Whom a drafter of several sources may ask."""

    @property
    def reason(self) -> str | None:
        """Why speculation is off or did not pay, in one sentence; None where it did."""

    def allowance(self, length: int) -> int:
        """Return how many nodes a drafter may propose after `length` tokens; 0 = do not draft."""

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the part of the proposal that is worth verifying; possibly the empty tree."""

    def observe(self, step: Step, length: int) -> None:
        """Learn from a step: `step.milliseconds` holds draft, verify, commit and host."""


@runtime_checkable
class BudgetPolicy(Protocol):
    """Decides how much of a draft is verified. Never changes the output, only its cost."""

    @property
    def name(self) -> str:
        """The name by which the policy is reported."""

    @property
    def needs_cost(self) -> bool:
        """Whether `open` wants the target's cost curve."""

    def open(self, cost: CostCurve | None) -> BudgetSession:
        """Return the policy for one row; `cost` is the target's curve, None where unknown."""
