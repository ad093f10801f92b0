"""The rule `cspd-repo`: what the public code of CSpD does (github.com/MarkXCloud/CSpD), biased.

Beside the paper's criterion: the factor is turned over, in acceptance and in what is left; the
differences from the means are divided by 42 before they are squared, so that nearly every draft is
kept; what falls is replaced where it stands and all that follows stays, judged in view of what it
replaced; a draft without a replacement after 100 tries becomes the zero latent; no latent of the
target's own follows. Deviations: the last step keeps its noise; a causal model judges each draft in
view of the drafts before it, and goes on with their keys, where the masked one of the code reads
what was known before all of them, and reads anew.
"""

from __future__ import annotations

import math

import torch

from ragspec.rules.base import TargetView, Verdict
from ragspec.rules.rejection import children_of
from ragspec.sampling.noise import NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftTree
from ragspec.visual.latents.rules.coupling import KINDS, expect_latents, left_of_paths, log_factor
from ragspec.visual.latents.table import LatentTable
from ragspec.visual.latents.target import LatentView

TEMPERATURE = 42.0  # that differences from the means are divided by
TRIES = 100


class CspdRepo:
    """Keep or replace each draft by itself, and keep all of them; biased, for reproduction."""

    name = "cspd-repo"
    label = "approximate"
    accepts = KINDS

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the path of all drafts, the last of which stands as the latent that follows."""
        view = expect_latents(self.name, target)
        table, children = view.target.table, children_of(tree)
        path, node = list[int](), ROOT
        while children[node]:
            below, current = children[node][0], view.token(node)
            drafted = int(tree.tokens[below])
            if table.indices[drafted] != view.index(node):  # its law is not known
                return Verdict(tuple(path), current)
            if not self._selection(view, node, drafted, current):
                table.replace(drafted, self._other(view, node, drafted, current))
            node = below
            path.append(node)
        if not path:
            return Verdict((), view.token(ROOT))
        return Verdict(tuple(path[:-1]), int(tree.tokens[path[-1]]))

    def _selection(self, view: LatentView, node: int, drafted: int, current: int) -> bool:
        table = view.target.table
        ratio = _tempered(table, drafted, current) - log_factor(table, drafted, current)
        return view.noise.uniform(view.index(node), NoiseUse.ACCEPT) < math.exp(min(ratio, 0.0))

    def _other(self, view: LatentView, node: int, drafted: int, current: int) -> torch.Tensor:
        table, index = view.target.table, view.index(node)
        factor = -log_factor(table, drafted, current)
        result = left_of_paths(view, index, drafted, current, 1, factor, TRIES)
        return torch.zeros_like(table.latents[current]) if result is None else result


def _tempered(table: LatentTable, drafted: int, current: int) -> float:
    """Return log p / q of a draft's last step, whose exponents are divided by 42 squared."""
    latent, logs = table.latents[drafted].double(), list[float]()
    for number in (current, drafted):
        deviation = table.deviations[number][0].double().expand_as(latent)
        difference = (latent - table.means[number][0].double()) / (deviation * TEMPERATURE)
        logs.append(-float((0.5 * difference.square() + deviation.log()).sum()))
    return logs[0] - logs[1]
