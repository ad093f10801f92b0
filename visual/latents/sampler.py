"""The denoising steps of a latent: times, and the Gaussian of each step.

DDPM's ancestral sampling (Ho et al., arXiv 2006.11239) on the cosine schedule of Nichol and
Dhariwal (2102.09672), for a model that predicts the clean latent. No step's deviation is below a
floor. That includes the last step, which has no noise in published samplers: rules need a density
to judge. The floor is part of the sampler, with drafts and without.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.checks import bounded, check_setting
from ragspec.visual.latents.model import MOST, DiffusionHead

OFFSET = 0.008


@dataclass(frozen=True, slots=True)
class NoiseSchedule:
    """T steps from noise to a latent; states are numbered T (noise) down to 0 (the latent).

    Attributes:
        steps: T.
        floor: Minimum deviation of a step, in deviations of the latents.

    Raises:
        InputError: `steps` is below 1, or `floor` outside (0, 1).
    """

    steps: int = 16
    floor: float = 0.1

    def __post_init__(self) -> None:
        check_setting("steps", self.steps)
        check_setting("floor", self.floor)
        if not self.floor:
            raise InputError(
                "got floor=0; expected a deviation above 0, such as 0.1: without noise in the last "
                "step nothing can be verified."
            )

    def gaussian_step(self, step: int) -> tuple[float, float, float]:
        """Return the Gaussian of x_(step - 1), given the clean latent and x_step.

        These are the factors of the two in its mean, and its deviation.
        """
        before, after = signal_share(step / self.steps), signal_share((step - 1) / self.steps)
        stays = before / after  # alpha of this step
        to_clean = math.sqrt(after) * (1.0 - stays) / (1.0 - before)
        to_noisy = math.sqrt(stays) * (1.0 - after) / (1.0 - before)
        variance = (1.0 - stays) * (1.0 - after) / (1.0 - before)
        return to_clean, to_noisy, max(math.sqrt(variance), self.floor)


def signal_share(time: float) -> float:
    """Return a latent's remaining share of the variance at a time from 0 (clean) to 1 (noise)."""
    start = math.cos(OFFSET / (1.0 + OFFSET) * math.pi / 2.0)
    angle = (time + OFFSET) / (1.0 + OFFSET) * math.pi / 2.0
    return min(max((math.cos(angle) / start) ** 2, 1e-5), 1.0)


def path_noise(noise: NoiseStream, indices: Sequence[int], steps: int, width: int) -> Tensor:
    """Return the normal numbers f64 [n, T + 1, D] of the latents at n indices."""
    lanes = torch.arange((steps + 1) * width).expand(len(indices), -1)
    return noise.normal(indices, lanes).reshape(len(indices), steps + 1, width)


@dataclass(frozen=True, slots=True, eq=False)
class LatentSample:
    """The latents of n places, with the steps that they were sampled in.

    Attributes:
        path: States x_0 (the latent) to x_T (noise), [n, T + 1, D].
        means: [n, T, D]; [:, t - 1] is the mean of x_(t - 1) given x_t.
        conditioning: The head's conditioning, [n, C, width].
        deviations: [n, T, D], or [n, T, 1] if all numbers of a latent have one; as `means`.
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

    Args:
        scale: Guidance scale, for places with a pair of states.
    """

    head: Any
    schedule: Any  # has `steps`, T
    scale: Any

    def __init__(self, head: DiffusionHead, schedule: NoiseSchedule, scale: float = 1.0) -> None:
        self.head, self.schedule, self.scale = head, schedule, scale
        steps = [schedule.gaussian_step(step) for step in range(1, schedule.steps + 1)]
        # Index t - 1 is for x_(t - 1) given x_t.
        self.factors = torch.tensor([each[:2] for each in steps], dtype=torch.float64)
        self.deviations = torch.tensor([each[2] for each in steps], dtype=torch.float64)

    def conditioning(self, states: Tensor) -> Tensor:
        """Return the head's conditioning [n, C, width] by states [n, C, H]."""
        return cast(Tensor, self.head.state(states))

    def draw(self, conditioning: Tensor, noise: Tensor, start: int | None = None) -> LatentSample:
        """Sample latents, step by step.

        Args:
            conditioning: [n, C, width], or [1, C, width] if all n latents are of one place.
            noise: [n, T + 1, D].
            start: Step of the first state, which is noise[:, start]; None is T.
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

        Deviations are [n, 1] or [1, 1] here, as they depend on the step alone.
        """
        times = (steps.to(noisy.dtype) / self.schedule.steps).to(noisy.device)
        clean = self.head.denoise(noisy[:, None], times[:, None], conditioning)
        guided = clean[:, 0]
        if conditioning.shape[1] == 2:
            guided = bounded(clean[:, 1] + self.scale * (clean[:, 0] - clean[:, 1]), MOST)
        to_clean, to_noisy = self.factors[steps - 1].to(noisy).unbind(-1)
        kind = torch.promote_types(noisy.dtype, torch.float32)
        deviations = self.deviations[steps - 1, None].to(noisy.device, kind)
        return to_clean[:, None] * guided + to_noisy[:, None] * noisy, deviations
