"""A head whose law is a mixture of Gaussians: its density is closed, so rules over it are proven.

As in GIVT (Tschannen et al., arXiv 2312.02116), with diagonal covariances. A latent takes one step:
the first number of x_1's noise picks the component, that of x_0 is its own. There is no guidance,
as a mix of two mixtures in the way of densities has no closed law.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ragspec.errors import InputError
from ragspec.visual.latents.sampler import LatentSample, NoiseSchedule, Sampler
from ragspec.visual.latents.target import LatentTarget


class MixtureHead(nn.Module):
    """Tells of K Gaussians from the trunk's state: weights, means and deviations.

    floor: least deviation, so that no density is unbounded.
    """

    def __init__(self, latent_dim: int, hidden: int, components: int, floor: float = 0.1) -> None:
        super().__init__()
        self.latent_dim, self.floor = latent_dim, floor
        self.state = nn.Linear(hidden, components * (1 + 2 * latent_dim))

    def distribution(
        self, message: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log weights [n, K], means and deviations [n, K, D] of what `state` gave [n, .]."""
        parts = message.reshape(len(message), -1, 1 + 2 * self.latent_dim)
        means, logs = parts[..., 1:].chunk(2, -1)
        return parts[..., 0].log_softmax(-1), means, logs.exp() + self.floor


class MixtureSampler(Sampler):
    """Draws latents by a `MixtureHead`; see `Sampler`."""

    head: MixtureHead
    spread = True

    def __init__(self, head: MixtureHead) -> None:
        super().__init__(head, NoiseSchedule(1, head.floor))

    def draw(
        self, message: torch.Tensor, noise: torch.Tensor, start: int | None = None
    ) -> LatentSample:
        """Return latents of what places are told [n, 1, .] and noise [n, 2, D], in one step."""
        logs, means, deviations = self.head.distribution(message[:, 0])
        picked = torch.special.ndtr(noise[:, 1, :1])
        component = (logs.exp().cumsum(-1) < picked).sum(-1).clamp(max=logs.shape[1] - 1)
        rows = torch.arange(len(message))
        mean = means[rows, component]
        latents = mean + deviations[rows, component] * noise[:, 0]
        path = torch.stack([latents, noise[:, 1]], 1)
        return LatentSample(path, mean[:, None], message, deviations[rows, component][:, None])

    def log_density(self, message: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        """Return log densities f64 [n] of latents [n, D], at one place told of [1, .]."""
        logs, means, deviations = (part.double() for part in self.head.distribution(message))
        difference = (latents.double()[:, None] - means) / deviations
        inner = 0.5 * (difference.square() + math.log(2.0 * math.pi)) + deviations.log()
        return (logs - inner.sum(-1)).logsumexp(-1)


class MixtureTarget(LatentTarget):
    """A `LatentModel` whose head is a `MixtureHead`; raises InputError for guidance."""

    def open_sampler(self, schedule: NoiseSchedule) -> Sampler:
        """Return what draws latents by the mixture."""
        head: Any = self.latent_model.head
        if not isinstance(head, MixtureHead):
            raise InputError(f"got a {type(head).__name__}; expected a MixtureHead.")
        if self.copies != 1:
            raise InputError(
                f"got guidance_scale {self.guidance_scale} with a mixture head; expected 1, as "
                "guided mixtures have no closed law."
            )
        return MixtureSampler(head)
