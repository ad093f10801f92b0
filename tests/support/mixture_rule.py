"""The rule of mixture heads: their densities are closed, so latents are judged as such."""

from __future__ import annotations

import torch

from ragspec.errors import RuleError
from ragspec.visual.latents.rules.cspd import Coupled, first_accepted, fresh_noise
from ragspec.visual.latents.table import LatentTable
from ragspec.visual.latents.target import LatentView
from tests.support.latent_mixture import MixtureSampler


class MixtureRule(Coupled):
    """Keep a latent with the chance min(1, p / q) of mixtures; the text follows the target's law.

    Raises RuleError where the target's head or the draft's is none.
    """

    name = "mixture"

    def steps(self, most: int) -> int:
        """Return 1: a latent is drawn at once."""
        return 1

    def log_ratio(self, view: LatentView, drafted: int, current: int) -> float:
        """Return log p / q of a drafted latent."""
        table = view.target.table
        latent = table.latents[drafted][None]
        return float(_log_density(table, current, latent) - _log_density(table, drafted, latent))

    def left(self, view: LatentView, index: int, drafted: int, current: int) -> torch.Tensor:
        """Return a latent [D] of max(0, p - q), by tries of the target's law."""
        table = view.target.table

        def propose(tries: range) -> tuple[torch.Tensor, torch.Tensor]:
            message = table.conditioning[current].expand(len(tries), -1, -1)
            noise = fresh_noise(view, index, tries, 2).to(table.paths)
            latents = table.sampler(current).draw(message, noise).latents
            by_target = _log_density(table, current, latents)
            return latents, by_target - _log_density(table, drafted, latents)

        result = first_accepted(view, index, propose)
        return table.latents[current] if result is None else result


def _log_density(table: LatentTable, number: int, latents: torch.Tensor) -> torch.Tensor:
    """Return log densities f64 [n] of latents [n, D] under the law that a latent was drawn from."""
    sampler = table.sampler(number)
    if not isinstance(sampler, MixtureSampler):
        raise RuleError(
            "rule 'mixture' got a head that denoises; expected one of mixtures. Use 'path'."
        )
    return sampler.log_density(table.conditioning[number], latents)
