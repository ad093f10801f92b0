"""The rule `cspd-paper`: the criterion of CSpD as published (Wang et al., arXiv 2411.11925).

The last step's ratio, of draft and target that ran with the same noise, is weighed by
f = prod over t >= 2 of |Sigma_t of the draft|^(1/2) / |Sigma_t of the target|^(1/2). That factor
biases it: given the noise, the last step alone is a draw, and its law is known without f. On a
schedule that draft and target share f is 1, and the law is that of `aligned`. Deviations: the last
step keeps its noise; the text is cut at the first draft that falls.
"""

from __future__ import annotations

import torch

from ragspec.visual.latents.rules.coupling import Coupled, left_of_paths, log_ratio
from ragspec.visual.latents.table import LatentTable
from ragspec.visual.latents.target import LatentView


class CspdPaper(Coupled):
    """Keep a draft with the chance min(1, f p / q), else draw of max(0, f p - q); biased by f."""

    name = "cspd-paper"
    label = "approximate"

    def steps(self, most: int) -> int:
        """Return 1."""
        return 1

    def log_ratio(self, view: LatentView, drafted: int, current: int) -> float:
        """Return log f p / q of a draft."""
        table = view.target.table
        return log_factor(table, drafted, current) + log_ratio(table, drafted, current, 1)

    def left(self, view: LatentView, index: int, drafted: int, current: int) -> torch.Tensor:
        """Return a latent [D] of max(0, f p - q), the target's own where nothing is left of it."""
        table = view.target.table
        factor = log_factor(table, drafted, current)
        result = left_of_paths(view, index, drafted, current, 1, factor)
        return table.latents[current] if result is None else result


def log_factor(table: LatentTable, drafted: int, current: int) -> float:
    """Return log f of the deviations of all steps but the last."""
    both = (table.deviations[each][1:].double() for each in (drafted, current))
    by_draft, by_target = (each.expand_as(table.means[current][1:]).log() for each in both)
    return float((by_draft - by_target).sum())
