"""Total variation of relaxed acceptance: the figure of each position, and a budget for an image.

Let e_i be the probability, given everything before position i, that the rule emits another code
there than the target's. Relaxed and plain decoding share their noise, so the images are the same
until the first such position. Hence TV(image, plain image) <= E[sum of e_i]: a bound on the sum in
every run bounds the distribution of the whole image. For drafts that do not depend on the noise,
e_i is known before the noise is used, and can be cut to the rest of the budget. For drafts coupled
to the noise only the outcome is known (1 if the code was replaced, else 0). It is correct on
average, but no bound. A drafter that uses the target's noise of later positions, or choices made
with it, must declare its drafts coupled.

`TVBudget` is the budget of an image; the rule of a row counts what it has spent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.rules.base import Rule, Step, TargetView, Verdict
from ragspec.rules.target_view import RowView
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.visual.checks import check_setting

APPROXIMATE = "approximate"


@dataclass(frozen=True, slots=True)
class TVBudget:
    """The maximum total variation to spend, summed over the positions of one image.

    Coupled drafts spend 1 on every replaced code, so that a total below 1 never relaxes them.

    Attributes:
        total: 0 relaxes nothing. From 1 on the sum is still limited, but bounds no distribution.
        positions: Codes per image, to spread the budget evenly: position i may use (i + 1) /
            positions of it, less the spending so far. None spends it first come, first served.

    Raises:
        InputError: `total` is negative or not finite, or `positions` is below 1.
    """

    total: float
    positions: int | None = None

    def __post_init__(self) -> None:
        check_setting("tv_budget", self.total)
        if self.positions is not None and self.positions < 1:
            raise InputError(f"got {self.positions} positions; expected at least 1, or None.")

    def left(self, index: int, spent: float) -> float:
        """Return what the position `index` may spend after `spent` at those before it."""
        share = 1.0 if self.positions is None else min(1.0, (index + 1) / self.positions)
        return max(0.0, self.total * share - spent)


def position_excess(steps: Sequence[Step], label: str) -> NDArray[np.float64]:
    """Return the total variation of each position of a generated text or image, f64 [T].

    It is 0 if an exact rule measured nothing, NaN if another rule did not measure. The mean over
    positions is `Report.tv_excess`, the sum is the image's.
    """
    unknown = 0.0 if label.startswith("exact") else nan
    figures: list[float] = []
    for step in steps:
        figures += [*step.excess, *[unknown] * (len(step.tokens) - len(step.excess))]
    return np.asarray(figures, dtype=np.float64)


LEAST = 1e-12  # lower limit of probabilities, so that an excluded code leaves the mean finite


class Surprising(Rule):
    """A rule that also measures the NLL gap of the codes that it emits, in nats; see `Verdict`."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name, self.accepts, self.needs = rule.name, rule.accepts, rule.needs

    @property
    def label(self) -> str:
        """The label of the rule, which may change with the drafts that it judged."""
        return self.rule.label

    def open(self) -> "Surprising":
        """Return a wrapper of the rule for one row."""
        return Surprising(self.rule.open())

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the rule's verdict with the NLL gap of every code that it emits."""
        verdict = self.rule.judge(tree, target)
        codes = [int(tree.tokens[node]) for node in verdict.path]
        codes += [] if verdict.token is None else [verdict.token]
        nodes = [ROOT, *verdict.path][: len(codes)]
        assert isinstance(target, RowView)
        return replace(verdict, nll_gap=nll_gap_of(target.distributions(nodes), codes))


def nll_gap_of(distributions: Tensor, codes: list[int]) -> tuple[float, ...]:
    """Return -log p(code) - H(p) of each code under its row of distributions f64 [n, V]."""
    logs = distributions.clamp_min(LEAST).log()
    chosen = logs[torch.arange(len(codes)), codes]
    return tuple(((distributions * logs).sum(-1) - chosen).tolist())
