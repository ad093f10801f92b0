"""The denoising steps of a latent: times, and the Gaussian that each step draws from.

DDPM's ancestral sampling (Ho et al., arXiv 2006.11239) on the cosine schedule of Nichol and
Dhariwal (2102.09672), of a model that predicts the clean latent. No step's deviation is below a
floor, the last one's included, which published samplers leave free of noise: a law without density
could not be judged. The floor is part of the sampler, for the target alone as for drafts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ragspec.errors import InputError

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
        """Return what the law of x_(step - 1) is made of, given x_step and the clean latent.

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


def noised(clean: torch.Tensor, noise: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """Return latents [N, D] at times [N] of their own, for training."""
    start = math.cos(OFFSET / (1.0 + OFFSET) * math.pi / 2.0)
    angle = (times + OFFSET) / (1.0 + OFFSET) * (math.pi / 2.0)
    share = (angle.cos() / start).square().clamp(1e-5, 1.0)[:, None]
    return share.sqrt() * clean + (1.0 - share).sqrt() * noise
