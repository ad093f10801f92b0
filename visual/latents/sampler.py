"""The denoising steps of a latent: times, and the Gaussian that each step draws from.

DDPM's ancestral sampling (Ho et al., arXiv 2006.11239) on the cosine schedule of Nichol and
Dhariwal (2102.09672), of a model that predicts the clean latent. No step's deviation is below a
floor, the last one's included, which published samplers leave free of noise: a distribution without
density could not be judged. The floor is part of the sampler, for the target alone as for drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.latents.model import MOST

OFFSET = 0.008


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """T steps from noise to a latent; states are numbered T (noise) down to 0 (the latent).

    steps: T. floor: least deviation of a step, in deviations of the latents. Raises InputError.
    """

    steps: int = 16
    floor: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0.0 < self.floor < 1.0:
            raise InputError(
                f"got {self.steps} steps with a floor of {self.floor}; expected at least 1, and a "
                "floor between 0 and 1: without noise in the last step nothing can be verified."
            )

    def time(self, step: int) -> float:
        """Return the time of the state x_step, 0 clean to 1 noise."""
        return step / self.steps

    def gaussian_step(self, step: int) -> tuple[float, float, float]:
        """Return the distribution of x_(step - 1), given x_step and the clean latent.

        These are the factors of both in its mean, and its deviation.
        """
        before, after = signal_share(self.time(step)), signal_share(self.time(step - 1))
        stays = before / after  # alpha of this step
        to_clean = math.sqrt(after) * (1.0 - stays) / (1.0 - before)
        to_noisy = math.sqrt(stays) * (1.0 - after) / (1.0 - before)
        variance = (1.0 - stays) * (1.0 - after) / (1.0 - before)
        return to_clean, to_noisy, max(math.sqrt(variance), self.floor)


def signal_share(time: float) -> float:
    """Return the share of a latent's variance that is left at a time from 0 to 1."""
    start = math.cos(OFFSET / (1.0 + OFFSET) * math.pi / 2.0)
    angle = (time + OFFSET) / (1.0 + OFFSET) * math.pi / 2.0
    return min(max((math.cos(angle) / start) ** 2, 1e-5), 1.0)


def noised(clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    """Return latents [N, D] at times [N] of their own, for training."""
    start = math.cos(OFFSET / (1.0 + OFFSET) * math.pi / 2.0)
    angle = (times + OFFSET) / (1.0 + OFFSET) * (math.pi / 2.0)
    share = (angle.cos() / start).square().clamp(1e-5, 1.0)[:, None]
    return share.sqrt() * clean + (1.0 - share).sqrt() * noise


@dataclass(frozen=True, slots=True, eq=False)
class LatentSample:
    """Latents and how they came about, for n places.

    path [n, T + 1, D]: the states x_0 (the latent) to x_T (noise). means [n, T, D], deviations
    [n, T, D] or [n, T, 1]: [:, t - 1] is that of x_(t - 1) given x_t. told [n, C, width]: what the
    head was told.
    """

    path: Tensor
    means: Tensor
    conditioning: Tensor
    deviations: Tensor

    @property
    def latents(self) -> Tensor:
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

    def conditioning(self, states: Tensor) -> Tensor:
        """Return what the head is told by states [n, C, H]: [n, C, width]."""
        result: Tensor = self.head.state(states)
        return result

    def draw(self, conditioning: Tensor, noise: Tensor, start: int | None = None) -> LatentSample:
        """Return latents of places [n, C, width] and noise [n, T + 1, D], by step.

        conditioning: [1, C, width] where all n are of one place, which the head then reads once.
        start: the first state is x_start, which stands in noise[:, start]; None is T.
        """
        last = int(self.schedule.steps) if start is None else start
        path, means, deviations = [noise[:, last]], [], []
        for step in range(last, 0, -1):
            mean, deviation = self.gaussian(conditioning, path[-1], torch.tensor([step]))
            means.append(mean)
            deviations.append(deviation.expand(len(mean), -1))
            path.append(mean + (deviation * noise[:, step - 1]).to(mean))
        parts = (torch.stack(each[::-1], 1) for each in (path, means, deviations))
        return LatentSample(next(parts), next(parts), conditioning, next(parts))

    def gaussian(self, conditioning: Tensor, noisy: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return means [n, D] and deviations of x_(t - 1) given x_t [n, D]; steps i64 [n] or [1].

        Deviations [n, 1] or [1, 1] here, as they hang on the step alone.
        """
        kind = torch.promote_types(noisy.dtype, torch.float32)
        deviations = self.deviations[steps - 1, None].to(noisy.device, kind)
        return self.means(conditioning, noisy, steps), deviations

    def means(self, conditioning: Tensor, noisy: Tensor, steps: Tensor) -> Tensor:
        """Return the means [n, D] of x_(t - 1) given x_t [n, D], for steps t i64 [n] or [1]."""
        times = (steps.to(noisy.dtype) / self.schedule.steps).to(noisy.device)
        clean = self.head.denoise(noisy[:, None], times[:, None], conditioning)
        guided = clean[:, 0]
        if conditioning.shape[1] == 2:
            guided = (clean[:, 1] + self.scale * (clean[:, 0] - clean[:, 1])).clamp(-MOST, MOST)
        to_clean, to_noisy = self.factors[steps - 1].to(noisy).unbind(-1)
        result: Tensor = to_clean[:, None] * guided + to_noisy[:, None] * noisy
        return result
