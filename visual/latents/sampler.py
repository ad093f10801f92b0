"""Draws latents: the head's steps from noise, for many places at once, with guidance.

A latent's noise goes by (seed, sample, generated index, step, number), so that a latent is a
function of what the trunk knew at its place, however often and beside whatever it is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ragspec.visual.latents.model import MOST
from ragspec.visual.latents.schedule import NoiseSchedule


@dataclass(frozen=True, slots=True, eq=False)
class LatentSample:
    """Latents and how they came about, for n places.

    path [n, T + 1, D]: the states x_0 (the latent) to x_T (noise). means [n, T, D], deviations
    [n, T, D] or [n, T, 1]: [:, t - 1] is that of x_(t - 1) given x_t. told [n, C, width]: what the
    head was told.
    """

    path: torch.Tensor
    means: torch.Tensor
    conditioning: torch.Tensor
    deviations: torch.Tensor

    @property
    def latents(self) -> torch.Tensor:
        """The latents [n, D]."""
        return self.path[:, 0]


class Sampler:
    """The steps of a head on a schedule.

    head: a `DiffusionHead`, or what denoises as one. scale: of guidance, where places are told of
    in pairs. spread: whether each number of a latent has a deviation of its own.
    """

    spread = False
    head: Any
    schedule: Any  # whose `steps` are T
    scale: Any

    def __init__(self, head: Any, schedule: NoiseSchedule, scale: float = 1.0) -> None:
        self.head, self.schedule, self.scale = head, schedule, scale
        steps = [schedule.gaussian_step(step) for step in range(1, schedule.steps + 1)]
        # Of x_(t - 1) given x_t, at t - 1.
        self.factors = torch.tensor([each[:2] for each in steps], dtype=torch.float64)
        self.deviations = torch.tensor([each[2] for each in steps], dtype=torch.float64)

    @property
    def lanes(self) -> int:
        """Normal numbers of one latent: (T + 1) D."""
        return (int(self.schedule.steps) + 1) * int(self.head.write.out_features)

    def conditioning(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the head is told by states [n, C, H]: [n, C, width]."""
        result: torch.Tensor = self.head.state(states)
        return result

    def draw(
        self, message: torch.Tensor, noise: torch.Tensor, start: int | None = None
    ) -> LatentSample:
        """Return latents of places [n, C, width] and noise [n, T + 1, D], by step.

        message: [1, C, width] where all n are of one place, which the head then reads once. start:
        the first state is x_start, which stands in noise[:, start]; None is T.
        """
        last = int(self.schedule.steps) if start is None else start
        path, means, deviations = [noise[:, last]], [], []
        for step in range(last, 0, -1):
            mean, deviation = self.gaussian(message, path[-1], torch.tensor([step]))
            means.append(mean)
            deviations.append(deviation.expand(len(mean), -1))
            path.append(mean + (deviation * noise[:, step - 1]).to(mean))
        parts = (torch.stack(each[::-1], 1) for each in (path, means, deviations))
        return LatentSample(next(parts), next(parts), message, next(parts))

    def gaussian(
        self, message: torch.Tensor, noisy: torch.Tensor, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means [n, D] and deviations of x_(t - 1) given x_t [n, D]; steps i64 [n] or [1].

        Deviations [n, 1] or [1, 1] here, as they hang on the step alone.
        """
        kind = torch.promote_types(noisy.dtype, torch.float32)
        deviations = self.deviations[steps - 1, None].to(noisy.device, kind)
        return self.means(message, noisy, steps), deviations

    def means(
        self, message: torch.Tensor, noisy: torch.Tensor, steps: torch.Tensor
    ) -> torch.Tensor:
        """Return the means [n, D] of x_(t - 1) given x_t [n, D], for steps t i64 [n] or [1]."""
        times = (steps.to(noisy.dtype) / self.schedule.steps).to(noisy.device)
        clean = self.head.denoise(noisy[:, None], times[:, None], message)
        guided = clean[:, 0]
        if message.shape[1] == 2:
            guided = (clean[:, 1] + self.scale * (clean[:, 0] - clean[:, 1])).clamp(-MOST, MOST)
        to_clean, to_noisy = self.factors[steps - 1].to(noisy).unbind(-1)
        result: torch.Tensor = to_clean[:, None] * guided + to_noisy[:, None] * noisy
        return result
