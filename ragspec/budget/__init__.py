"""How much of a draft is verified, and which sources are asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.budget.base import Adviser as Adviser
    from ragspec.budget.base import BudgetPolicy as BudgetPolicy
    from ragspec.budget.base import BudgetSession as BudgetSession
    from ragspec.budget.cost_curve import CostCurve as CostCurve
    from ragspec.budget.policy import AutoBudget as AutoBudget
    from ragspec.budget.policy import FixedBudget as FixedBudget
    from ragspec.budget.policy import make_budget as make_budget

_WHERE = {
    "Adviser": "ragspec.budget.base",
    "AutoBudget": "ragspec.budget.policy",
    "BudgetPolicy": "ragspec.budget.base",
    "BudgetSession": "ragspec.budget.base",
    "CostCurve": "ragspec.budget.cost_curve",
    "FixedBudget": "ragspec.budget.policy",
    "make_budget": "ragspec.budget.policy",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
