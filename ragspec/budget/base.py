"""The protocol of budget policies, which decide how much of a draft is verified.

A policy grants nodes before each draft, trims the draft and learns from each step. Its adviser
decides which sources draft. Neither changes the output, only its cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np

from ragspec.budget.calibration import UNKNOWN, AcceptanceRatio, Appraisal, Calibration
from ragspec.budget.forward_cost import ForwardCost, SharedForward
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree


class Adviser:
    """Advises a drafter of several sources; this class corrects claims and lets all sources draft.

    Attributes:
        rate: Tokens per millisecond at present, the price of time; 0 while unknown.
        rested: For each source that was skipped in this text: for how many steps, and why.
    """

    rate = 0.0

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self.rested: dict[str, str] = {}
        self._open: list[Appraisal] = []
        self._text: dict[str, AcceptanceRatio] = {}

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        """Return how many nodes to draft, 0 for none, given the best draft's probability."""
        return budget

    def allowance(self, source: str, budget: int) -> int:
        """Return how many nodes a source may draft after the trees appraised so far."""
        return budget

    def appraised(self, tree: DraftTree) -> DraftTree:
        """Return the drafter's tree; appraise it if the drafter did not."""
        return tree if self._open else self.appraise(tree, UNKNOWN)

    def appraise(self, tree: DraftTree, root: int) -> DraftTree:
        """Return the tree with corrected acceptance probabilities, and record it for `learn`.

        Args:
            root: The last committed token.
        """
        appraisal = self.calibration.appraise(tree, root, self._text)
        self._open.append(appraisal)
        return replace(tree, accept_prob=np.asarray(appraisal.accept_prob, dtype=np.float32))

    def learn(self, tokens: Sequence[int]) -> list[int]:
        """Learn from the emitted tokens; return how many nodes of each tree the text followed."""
        opened, self._open = self._open, []
        return [self.calibration.learn(each, tokens) for each in opened]

    def spent(self, source: str, milliseconds: float) -> None:
        """Record the milliseconds of a source's draft, after any tree of it was appraised."""


class BudgetSession(Protocol):
    """The policy for one sequence."""

    @property
    def adviser(self) -> Adviser:
        """The adviser of a drafter of several sources."""

    @property
    def reason(self) -> str | None:
        """Why speculation is off or did not pay, in one sentence; None if it paid."""

    def allowance(self, length: int) -> int:
        """Return how many nodes a drafter may propose after `length` tokens; 0 = do not draft."""

    def fit(self, tree: DraftTree, length: int) -> DraftTree:
        """Return the part of the draft that is worth verifying; possibly the empty tree."""

    def observe(self, step: Step, length: int) -> None:
        """Learn from a step, whose `milliseconds` hold draft, verify, commit and host."""


@runtime_checkable
class BudgetPolicy(Protocol):
    """Decides how much of a draft is verified. Never changes the output, only its cost."""

    @property
    def name(self) -> str:
        """The name by which the policy is reported."""

    @property
    def needs_cost(self) -> bool:
        """Whether `open` needs the cost of the target's forwards."""

    def open(
        self, cost: ForwardCost | None = None, forward: SharedForward | None = None
    ) -> BudgetSession:
        """Return the policy for one sequence.

        Args:
            cost: That of the target's forwards, None if unknown.
            forward: The forward that the sequences share, None for a single sequence.
        """
