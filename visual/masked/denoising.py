"""The denoising steps of MAR's head: learned variances, and guidance of the noise alone.

Of two rows, with the condition and without, only the predicted noise is mixed; the variance is that
of the conditional row (MAR, Li et al., arXiv 2406.11838, as published).
"""

from __future__ import annotations

import torch

from ragspec.visual.latents.sampler import Sampler
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule


class NoiseSampler(Sampler):
    """The steps of a `NoiseHead` on a `LearnedSchedule`; see `Sampler`.

    scale: of guidance, where places are told of in pairs: a number, or [n, 1] where places have
    their own. temperature: of the noise of the steps, not of the state that they begin with.
    """

    spread = True

    def __init__(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        scale: float | torch.Tensor = 1.0,
        temperature: float = 1.0,
    ) -> None:
        self.head, self.schedule, self.scale = model.head, schedule, scale
        self.temperature, self.clip = temperature, model.config.clip
        self._times = torch.tensor(schedule.times)

    @property
    def lanes(self) -> int:
        """Normal numbers of one latent: (T + 1) D."""
        return (int(self.schedule.steps) + 1) * int(self.head.input_proj.in_features)

    def conditioning(self, states: torch.Tensor) -> torch.Tensor:
        """Return what the head is told by states [..., H]: [..., width]."""
        result: torch.Tensor = self.head.cond_embed(states)
        return result

    def gaussian(
        self, message: torch.Tensor, noisy: torch.Tensor, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return means and deviations [n, D] of x_(t - 1) given x_t [n, D]; steps i64 [n] or [1].

        told [n or 1, C, width]: by the conditional row, and with guidance by the other after it.
        """
        copies, size = message.shape[1], len(noisy)
        times = self._times[steps - 1].to(noisy.device)
        rows = noisy.to(message.dtype).repeat(copies, 1)
        times = times.repeat(copies) if len(times) > 1 else times
        message = message.expand(size, -1, -1).transpose(0, 1).flatten(0, 1)
        noise, variance = self.head(rows, times, message)
        noise, variance = noise.to(noisy), variance[:size].to(noisy)
        if copies == 2:
            noise = noise[size:] + self.scale * (noise[:size] - noise[size:])
        clean = self.schedule.clean(steps, noisy, noise)
        if self.clip is not None:
            clean = clean.clamp(-self.clip, self.clip)
        deviations = self.temperature * self.schedule.deviation(steps, variance)
        return self.schedule.mean(steps, noisy, clean), deviations
