"""How far relaxed acceptance may move the image's distribution: the figure, its budget.

Let e_i be the probability, given all that came before position i, that the rule emits another code
there than the target's own. Relaxed and plain decoding share their noise, so the images are the
same until the first such position. Hence TV(image, plain image) <= E[sum of e_i]: a bound on
the sum, kept in every run, bounds the distribution of the whole image. For drafts that do not
depend on the noise e_i is known before the noise is looked at, and can be cut to what the budget
has left. For drafts coupled to the noise only the outcome is known (1 where the code was replaced,
else 0): a right figure on average, no bound. A drafter that looks at the target's noise, or at
choices made with it, for positions still to come must declare its drafts coupled.

`TVBudget` holds the budget of an image, `Spending` what one row has used of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite, nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.rules.base import Around, Step, TargetView, Verdict
from ragspec.rules.target_view import RowView
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

APPROXIMATE = "approximate"


@dataclass(frozen=True, slots=True)
class TVBudget:
    """The most total variation, summed over the positions of one image, that may be spent.

    total: 0 relaxes nothing; from 1 on the sum is still kept, yet says nothing about the
    distribution. Coupled drafts spend 1 on every replaced code, so that less than 1 relaxes them
    nowhere. positions: codes of an image; then the budget is spread evenly, position i having (i +
    1) / positions of it at hand less what was spent before. None spends it first come, first
    served. Raises InputError for a negative total or no positions.
    """

    total: float
    positions: int | None = None

    def __post_init__(self) -> None:
        if not (isfinite(self.total) and self.total >= 0.0):
            raise InputError(f"got tv_budget={self.total}; expected a number of at least 0.")
        if self.positions is not None and self.positions < 1:
            raise InputError(f"got {self.positions} positions; expected at least 1, or None.")


class Spending:
    """What one row has spent of its budget; without a budget all may be spent."""

    def __init__(self, budget: TVBudget | None) -> None:
        self.budget = budget
        self.spent = 0.0
        self.bounds = True

    def prepare_batch(self, kind: DraftKind) -> None:
        """Take note of the kind of a draft that has nodes: only deterministic ones give bounds."""
        self.bounds &= kind is DraftKind.DETERMINISTIC

    def left(self, index: int) -> float:
        """Return what may be spent at the position `index` of the image."""
        if self.budget is None:
            return np.inf
        share = 1.0
        if self.budget.positions is not None:
            share = min(1.0, (index + 1) / self.budget.positions)
        return max(0.0, self.budget.total * share - self.spent)

    def spend(self, excess: float) -> None:
        """Take note of what a position used."""
        self.spent += excess

    @property
    def label(self) -> str:
        """`bounded(tv<=total)` where the budget bounds what is drawn, else `approximate`."""
        if self.budget is None or not self.bounds or self.budget.total >= 1.0:
            return APPROXIMATE
        return f"bounded(tv<={float(self.budget.total)})"  # unrounded: not below what is kept


def position_excess(steps: Sequence[Step], label: str) -> NDArray[np.float64]:
    """Return the figure of each position of a generated text or image: f64 [T].

    steps, label: of a `Generation`. 0 where an exact rule measured nothing, NaN where another
    rule did not measure; the mean over positions is `Report.tv_excess`, the sum the image's.
    """
    unknown = 0.0 if label.startswith("exact") else nan
    figures: list[float] = []
    for step in steps:
        missing = len(step.tokens) - len(step.excess)
        figures += [*step.excess, *[unknown] * missing]
    return np.asarray(figures, dtype=np.float64)


LEAST = (
    1e-12  # a distribution's probability of a code that it excludes, so that the mean stays finite
)


class Surprising(Around):
    """A rule that also tells the NLL gap of what it emits, in nats, see `Verdict`."""

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the rule's verdict with the NLL gap of every code that it emits."""
        verdict = self.rule.judge(tree, target)
        codes = [int(tree.tokens[node]) for node in verdict.path]
        nodes = [ROOT, *verdict.path]
        if verdict.token is not None:
            codes.append(verdict.token)
        nodes = nodes[: len(codes)]
        if isinstance(target, RowView):
            distributions = target.distributions(nodes)
        else:
            distributions = torch.stack([target.probabilities(node) for node in nodes])
        return replace(verdict, nll_gap=nll_gap_of(distributions, codes))


def nll_gap_of(distributions: Tensor, codes: list[int]) -> tuple[float, ...]:
    """Return -log p(code) - H(p) of codes, each under its distribution f64 [n, V]."""
    logs = distributions.clamp_min(LEAST).log()
    chosen = logs[torch.arange(len(codes)), codes]
    result: list[float] = ((distributions * logs).sum(-1) - chosen).tolist()
    return tuple(result)
