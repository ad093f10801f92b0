"""What a budget policy is: asked before each draft, shown each draft, told of each step.

It decides how much of a draft is verified, and its adviser which sources are asked. It never
changes the output, only its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import numpy as np

from ragspec.budget.calibration import UNKNOWN, Appraisal, Calibration
from ragspec.budget.cost_curve import CostCurve, SharedCost
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class Settings:
    """What AutoBudget is made with, see there; raises InputError for what is out of bounds."""

    margin: float
    probe_share: float
    maximum: int

    def __post_init__(self) -> None:
        if not (0.0 <= self.margin < 1.0 and 0.0 <= self.probe_share < 1.0 and self.maximum >= 1):
            raise InputError(
                f"got {self}; expected shares in [0, 1) and at least one node. Use budget=0 for "
                "plain decoding."
            )


class Adviser:
    """Whom a drafter may ask while it proposes; this one corrects claims and asks everyone.

    rate: tokens per millisecond at present, the price of time; 0 where it is not known.
    """

    rate = 0.0

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._open: list[Appraisal] = []
        self._alone: dict[str, int] = {}  # steps in which a source was left alone; 0: the text

    @property
    def rested(self) -> dict[str, str]:
        """For how many steps of the text a source was left alone, and why."""
        text = "the whole text, as its training costs more time than it saves"
        return {
            name: f"{steps} steps, as it costs more time than it saves" if steps else text
            for name, steps in self._alone.items()
        }

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        """Return how many nodes to draft in all, given how likely the best draft is; 0: none."""
        return budget

    def allowance(self, source: str, budget: int) -> int:
        """Return how many nodes to ask a source for, after the trees appraised so far."""
        return budget

    def appraised(self, tree: DraftTree) -> DraftTree:
        """Return the tree of a drafter, appraised now where it asked for no advice."""
        return tree if self._open else self.appraise(tree, UNKNOWN)

    def appraise(self, tree: DraftTree, root: int) -> DraftTree:
        """Return the tree with corrected reach, and keep it until its outcome is known.

        root: the last token.
        """
        appraisal = self.calibration.appraise(tree, root)
        self._open.append(appraisal)
        return replace(tree, accept_prob=np.asarray(appraisal.accept_prob, dtype=np.float32))

    def learn(self, tokens: Sequence[int]) -> list[int]:
        """Count what came of the step's trees; returns how far the text followed each of them."""
        opened, self._open = self._open, []
        return [self.calibration.learn(each, tokens) for each in opened]

    def spent(self, source: str, milliseconds: float) -> None:
        """Note the time that a source took, which has been appraised if it proposed anything."""

    def rests(self, source: str) -> bool:
        """Return whether to leave a source alone for this text, as it does not pay to teach it."""
        return False

    def taught(self, source: str, milliseconds: float) -> None:
        """Note the time that it took to tell a source of a step."""


class BudgetSession(Protocol):
    """The policy for one row of text."""

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

    def open(self, cost: CostCurve | SharedCost | None) -> BudgetSession:
        """Return the policy for one row; `cost` is the target's, None where unknown.

        Rows that share forwards have a `SharedCost`, a text alone may have the curve itself.
        """
