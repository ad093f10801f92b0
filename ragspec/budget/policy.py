"""Budget policies: a fixed number of draft nodes, or one chosen by the clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.forward_cost import ForwardCost, SharedForward
from ragspec.budget.goodput import AutoBudget
from ragspec.errors import InputError, UnknownNameError
from ragspec.sampling.settings import whole


def make_budget(spec: int | str | BudgetPolicy) -> BudgetPolicy:
    """Return the policy for "auto" or a number of nodes; a policy is returned as it is.

    Raises:
        InputError: The number is below 0.
        UnknownNameError: The word is another.
    """
    if isinstance(spec, str) and spec.strip().lstrip("-").isdecimal():
        spec = int(spec)
    if (nodes := whole(spec)) is not None:
        return FixedBudget(nodes)
    if spec == "auto":
        return AutoBudget()
    if isinstance(spec, BudgetPolicy):
        return spec
    raise UnknownNameError(
        f"got budget {spec!r}, expected 'auto' or a number of draft nodes (0 = plain decoding)."
    )


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """A fixed number of nodes, those most likely to be accepted; 0 never drafts."""

    nodes: int
    needs_cost: ClassVar[bool] = False

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
    ) -> BudgetSession:
        """Return the budget of one sequence; it ignores the cost."""
        return BudgetSession(self.nodes)
