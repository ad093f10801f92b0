"""The rule `cspd-paper`, the criterion of CSpD (Wang et al., arXiv 2411.11925); biased.

It weighs p by a factor f of the deviations before the last step, which `aligned` leaves out.
"""

from __future__ import annotations

from ragspec.visual.latents.rules import Coupled
from ragspec.visual.latents.target import LatentTable


class CspdPaper(Coupled):
    """Keeps a draft with probability min(1, f p / q), else samples max(0, f p - q); biased by f."""

    name = "cspd-paper"
    label = "approximate"
    s = 1

    def log_factor(self, table: LatentTable, drafted: int, sampled: int) -> float:
        """Return log f, the summed log ratio of draft to target deviations before the last step."""
        both = (table.deviations[each][1:].double() for each in (drafted, sampled))
        by_draft, by_target = (each.expand_as(table.means[sampled][1:]).log() for each in both)
        return float((by_draft - by_target).sum())
