"""The rule `near`: a draft stays where the target's own latent, made with the same noise, is near.

It is `walk` over latents: no density is asked, and with r = 0 the picture is the plain one.
"""

from __future__ import annotations

import math

import torch

from ragspec.errors import InputError
from ragspec.rules.base import TargetView, Verdict
from ragspec.trees.draft_tree import DraftTree
from ragspec.visual.checks import is_number
from ragspec.visual.latents.rules.base import KINDS, expect_latents, walk
from ragspec.visual.latents.target import LatentView


class Near:
    """Keep a draft within r of the target's own latent, which was made with the same noise.

    r: Euclidean distance, in deviations of the latents; 0 keeps what is the same, so that the
    picture is the plain one. Raises InputError for an r below 0.
    """

    name = "near"
    accepts = KINDS

    def __init__(self, r: float = 0.02) -> None:
        if not (is_number(r) and math.isfinite(r) and r >= 0.0):
            raise InputError(f"got r {r!r}; expected a distance of 0 or more, such as 0.02.")
        self.r = r
        self.label = "approximate" if r else "exact"

    def judge(self, tree: DraftTree, target: TargetView) -> Verdict:
        """Return the accepted path and the latent that follows it."""
        return walk(tree, expect_latents(self.name, target), self._emit)

    def _emit(self, view: LatentView, node: int, drafted: int, current: int) -> int:
        table = view.target.table
        if table.indices[drafted] != view.index(node):
            return current
        difference = torch.linalg.vector_norm(table.latents[drafted] - table.latents[current])
        return drafted if float(difference) <= self.r else current
