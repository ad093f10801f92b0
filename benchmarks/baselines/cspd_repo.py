"""The rule `cspd-repo`, as in the public code of CSpD (github.com/MarkXCloud/CSpD); biased.

The code differs from the paper's criterion:

- It inverts the factor, in acceptance and in the residual.
- It divides the differences from the means by 42 before it squares them, so it accepts nearly every
  draft.
- It replaces a rejected draft in place and keeps later drafts, which were judged after that draft.
- A draft without a replacement after 100 attempts becomes the zero latent.
- No latent of the target follows the drafts.

Deviations: the last step keeps its noise. A causal model judges each draft after the drafts before
it and continues with their keys; the masked model of the code sees only the latents before all of
them and prefills again.
"""

from __future__ import annotations

import math

import torch

from baselines.cspd_paper import CspdPaper
from ragspec.needs import Needs
from ragspec.rules.base import Rule, TargetView, Verdict
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.trees.operations import children
from ragspec.visual.latents.rules import LatentRule, first_accepted
from ragspec.visual.latents.target import Judged, LatentTable, LatentView

TEMPERATURE = 42.0  # divisor of the differences from the means
TRIES = 100


class _Inverted(CspdPaper):
    """CSpD's criterion with the inverted factor."""

    def log_factor(self, table: LatentTable, drafted: int, sampled: int) -> float:
        """Return -log f."""
        return -super().log_factor(table, drafted, sampled)


_INVERTED = _Inverted()


class CspdRepo(Rule):
    """Accept or replace each draft independently and commit all; biased, for reproduction."""

    name = "cspd-repo"
    label = "approximate"
    accepts = LatentRule.accepts
    needs = Needs(latents=True)

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the path of all drafts, the last one as the token after the path."""
        view = target
        assert isinstance(view, LatentView)
        table, all_below = view.target.table, children(tree.parents)
        path, node = list[int](), ROOT
        while node in all_below:
            below, target_latent = all_below[node][0], view.token(node)
            drafted, index = int(tree.tokens[below]), view.index(node)
            if table.indices[drafted] != index:  # its distribution is unknown
                table.judged[target_latent] = Judged(None, target_latent, target_latent)
                return Verdict(tuple(path), target_latent)
            table.judged[drafted] = Judged(drafted, target_latent, drafted)
            if not self._accepts(view, node, drafted, target_latent):
                table.paths[drafted, 0] = self._resample(view, node, drafted, target_latent)
            node = below
            path.append(node)
        if not path:
            token = view.token(ROOT)
            table.judged[token] = Judged(None, token, token)
            return Verdict((), token)
        return Verdict(tuple(path[:-1]), int(tree.tokens[path[-1]]))

    def _accepts(self, view: LatentView, node: int, drafted: int, target: int) -> bool:
        table = view.target.table
        ratio = _tempered(table, drafted, target) + _INVERTED.log_factor(table, drafted, target)
        return view.noise.uniform(view.index(node), NoiseUse.ACCEPT) < math.exp(min(ratio, 0.0))

    def _resample(self, view: LatentView, node: int, drafted: int, target: int) -> torch.Tensor:
        table, index = view.target.table, view.index(node)
        tries = _INVERTED.tries(view, index, drafted, target)
        latent = first_accepted(view, index, tries, TRIES)
        return torch.zeros_like(table.latents[target]) if latent is None else latent


def _tempered(table: LatentTable, drafted: int, target: int) -> float:
    """Return log p / q of a draft's last step, whose exponents are divided by 42 squared."""
    latent, logs = table.latents[drafted].double(), list[float]()
    for number in (target, drafted):
        deviation = table.deviations[number][0].double().expand_as(latent)
        difference = (latent - table.means[number][0].double()) / (deviation * TEMPERATURE)
        logs.append(-float((0.5 * difference.square() + deviation.log()).sum()))
    return logs[0] - logs[1]
