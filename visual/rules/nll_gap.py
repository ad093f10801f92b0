"""How far the codes of a picture are from what the target expects: a figure that relaxing moves.

A code drawn from the target's law p has -log p(code) of mean H(p). So the mean of
-log p(code) - H(p) over the codes of a picture, each under the law at its own place (guidance,
temperature and top-k included), is 0 for every rule whose law is the target's, whatever the
pictures show, and grows where unlikelier codes are put in the place of likelier ones. The terms are
differences of a martingale, so that their mean square gives the error of the mean.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ragspec.rules.base import Around, TargetView, Verdict
from ragspec.rules.target_view import RowView
from ragspec.trees.draft_tree import ROOT, DraftTree

LEAST = 1e-12  # a law's probability of a code that it excludes, so that the mean stays finite


class Surprising(Around):
    """A rule that also tells the surprise of what it emits, in nats, see `Verdict`."""

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the rule's verdict with the surprise of every code that it emits."""
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


def nll_gap_of(distributions: torch.Tensor, codes: list[int]) -> tuple[float, ...]:
    """Return -log p(code) - H(p) of codes, each under its law f64 [n, V]."""
    logs = distributions.clamp_min(LEAST).log()
    current = logs[torch.arange(len(codes)), codes]
    result: list[float] = ((distributions * logs).sum(-1) - current).tolist()
    return tuple(result)
