"""The sessions and policies of a budget, which decide how much of a draft is verified.

A policy opens a session for each sequence. The session grants nodes before each draft, trims the
draft and learns from each step. It never changes the output, only its cost.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from ragspec.budget.forward_cost import ForwardCost
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best


class BudgetSession:
    """The budget of one sequence; this class grants a fixed number of nodes to every source.

    Attributes:
        size: The number of nodes.
        rate: Tokens per millisecond at present, the price of time; 0 while unknown.
        rested: For each source that was skipped in this text: for how many steps, and why.
    """

    rate = 0.0

    def __init__(self, size: int) -> None:
        self.size = size
        self.rested: dict[str, str] = {}

    @property
    def reason(self) -> str | None:
        """Why speculation is off or did not pay, in one sentence; None if it paid."""
        return None if self.size else "the budget is 0: plain decoding was asked for"

    def allowance(self, length: int, rows: int = 1) -> int:
        """Return how many nodes may be proposed after `length` tokens; 0 = do not draft.

        Args:
            rows: Sequences that share the forward.
        """
        return self.size

    def nodes(self, expected_acceptance: float | None, budget: int) -> int:
        """Return how many nodes to draft, 0 for none, given the best draft's probability."""
        return budget

    def share(self, source: str, budget: int) -> int:
        """Return how many nodes a source may draft after the trees appraised so far."""
        return budget

    def appraise(self, tree: DraftTree) -> DraftTree:
        """Return a source's tree with corrected acceptance probabilities."""
        return tree

    def spent(self, source: str, milliseconds: float) -> None:
        """Record the milliseconds of a source's draft, after any tree of it was appraised."""

    def fit(self, tree: DraftTree) -> DraftTree:
        """Return the part of the draft that is worth verifying; possibly the empty tree."""
        return keep_best(tree, self.size)

    def observe(self, step: Step) -> None:
        """Learn from a step, whose `milliseconds` hold draft, verify, commit and host."""


class BudgetPolicy(ABC):
    """Decides how much of a draft is verified; its sessions share what they learn.

    Attributes:
        name: The name by which the policy is reported.
        needs_cost: Whether `open` needs the cost of the target's forwards.
    """

    name: str
    needs_cost = False

    @abstractmethod
    def open(self, cost: ForwardCost | None = None) -> BudgetSession:
        """Return the budget of one sequence.

        Args:
            cost: That of the target's forwards, None if unknown.
        """


@dataclass(frozen=True, slots=True)
class FixedBudget(BudgetPolicy):
    """A fixed number of nodes, those most likely to be accepted; 0 never drafts."""

    nodes: int
    name: str = field(init=False)

    def __post_init__(self) -> None:
        if self.nodes < 0:
            raise InputError(
                f"got budget {self.nodes}; expected 0 or more. Use 0 for plain decoding or 'auto'."
            )
        object.__setattr__(self, "name", f"fixed-{self.nodes}")

    def open(self, cost: ForwardCost | None = None) -> BudgetSession:
        """Return the budget of one sequence; it ignores the cost."""
        return BudgetSession(self.nodes)
