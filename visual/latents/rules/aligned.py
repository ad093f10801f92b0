"""The rule `aligned`: CSpD's criterion (Wang et al., arXiv 2411.11925) made lossless.

Draft and target run with the same noise, each from its own states, down to the last step, whose two
Gaussians are compared. Deviations: no factor of the earlier steps' deviations, which biases it
(see `cspd_paper`); what is left of the target's law is drawn by reflection (De Bortoli et al.,
arXiv 2501.05370), without tries, where both deviations are one, as on a schedule that is shared.
"""

from __future__ import annotations

import torch

from ragspec.visual.latents.rules.coupling import Coupled
from ragspec.visual.latents.target import LatentView


class Aligned(Coupled):
    """Couple the last denoising step of draft and target; the text follows the target's law."""

    name = "aligned"

    def steps(self, most: int) -> int:
        """Return 1."""
        return 1

    def left(self, view: LatentView, index: int, drafted: int, current: int) -> torch.Tensor:
        """Return the draft mirrored, or a latent that tries bring: [D]."""
        table = view.target.table
        if not bool((table.deviations[current][0] == table.deviations[drafted][0]).all()):
            return super().left(view, index, drafted, current)
        return self.mirrored(view, drafted, current)

    def mirrored(self, view: LatentView, drafted: int, current: int) -> torch.Tensor:
        """Return the target's latent [D] with the draft's last noise, mirrored between the means.

        Right for two Gaussians of the same deviations alone.
        """
        table = view.target.table
        by_target, by_draft = table.means[current][0], table.means[drafted][0]
        deviation = table.deviations[current][0].to(by_target)
        noise = (table.paths[drafted][0] - by_draft) / deviation
        difference = (by_draft - by_target) / deviation
        length = torch.linalg.vector_norm(difference)
        if not float(length):  # one law, where only rounding rejects
            return table.latents[current]
        difference = difference / length
        result: torch.Tensor = by_target + deviation * (
            noise - 2.0 * (difference @ noise) * difference
        )
        return result
