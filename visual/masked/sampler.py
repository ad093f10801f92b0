"""The denoising steps of MAR's head: learned variances, and guidance of the noise alone.

Guidance mixes only the predicted noise of the conditional and the unconditional row. The variance
is that of the conditional row (MAR, Li et al., arXiv 2406.11838, as published).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.visual.checks import bounded, check_setting
from ragspec.visual.latents.sampler import Sampler, path_noise
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule, guidance_at, masked_counts


class NoiseSampler(Sampler):
    """The denoising steps of a `NoiseHead` on a `LearnedSchedule`; see `Sampler`.

    Args:
        scale: Of guidance, for inputs of two rows: a number, or [n, 1] for one per place.
        temperature: Of the noise of the steps, not of the initial state.
    """

    def __init__(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        scale: float | Tensor = 1.0,
        temperature: float = 1.0,
    ) -> None:
        self.head, self.schedule, self.scale = model.head, schedule, scale
        self.temperature, self.clip = temperature, model.config.clip
        self._times = torch.tensor(schedule.times)

    def conditioning(self, states: Tensor) -> Tensor:
        """Return the head's conditioning [..., width] for states [..., H]."""
        embedded: Tensor = self.head.cond_embed(states)
        return embedded

    def gaussian(self, conditioning: Tensor, noisy: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Return means and deviations [n, D] of x_(t - 1) given x_t [n, D].

        Args:
            conditioning [n or 1, C, width]: Of the conditional row, then under guidance of the
                unconditional one.
            steps i64 [n] or [1]: t.
        """
        copies, size = conditioning.shape[1], len(noisy)
        times = self._times[steps - 1].to(noisy.device)
        rows = noisy.to(conditioning.dtype).repeat(copies, 1)
        times = times.repeat(copies) if len(times) > 1 else times
        conditioning = conditioning.expand(size, -1, -1).transpose(0, 1).flatten(0, 1)
        noise, variance = self.head(rows, times, conditioning)
        noise, variance = noise.to(noisy), variance[:size].to(noisy)
        if copies == 2:
            noise = noise[size:] + self.scale * (noise[:size] - noise[size:])
        clean = self.schedule.clean(steps, noisy, noise)
        if self.clip is not None:
            clean = bounded(clean, self.clip)
        deviations = self.temperature * self.schedule.deviation(steps, variance)
        return self.schedule.mean(steps, noisy, clean), deviations


OnIteration = Callable[[int, Tensor], bool]
"""Takes the number of generated latents and the latents [B, N, D], 0 for missing ones.

Returns whether to continue.
"""


class MaskedSampler:
    """Generates without drafts, as published (MAR, Li et al., arXiv 2406.11838, sections 3.3, 4).

    Args:
        iterations: Forwards of the model; latents of one iteration are sampled independently.
        scale: Of guidance, which rises linearly from 1 with the share of generated latents; 1 runs
            the conditional rows alone.
        temperature: See `NoiseSampler`.

    Raises:
        InputError: scale or temperature is negative or infinite, or iterations are out of range.
    """

    def __init__(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        iterations: int = 64,
        scale: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        for name, value in (("guidance_scale", scale), ("temperature", temperature)):
            check_setting(name, value)
        self.model, self.schedule = model, schedule
        self.left = masked_counts(model.places, iterations)
        self.scale, self.temperature = float(scale), float(temperature)
        self.copies = 1 if self.scale == 1.0 else 2

    @torch.no_grad()
    def draw(
        self, labels: Tensor, noises: Sequence[NoiseStream], on_iteration: OnIteration | None = None
    ) -> Tensor:
        """Generate standardised latents f32 [B, N, D], or f64 with a float64 model.

        Args:
            labels i64 [B]: The class of each image.
            on_iteration: Called after each iteration; False ends the call, with 0 for the rest.
        """
        model, rows, places = self.model, len(labels), self.model.places
        condition = model.condition(labels)
        if self.copies == 2:
            condition = torch.cat([condition, model.unconditional(rows)])
        orders = torch.stack([order_of(noise, places) for noise in noises])
        kind = torch.promote_types(model.dtype, torch.float32)
        latents = torch.zeros(
            rows, places, model.config.latent_dim, dtype=kind, device=model.device
        )
        done = 0
        for left in self.left:
            now = places - left
            known = orders[:, :done].sort(-1).values.to(model.device)
            inputs = latents.to(model.dtype).repeat(self.copies, 1, 1)
            states = model.states(inputs, known.repeat(self.copies, 1), condition)
            order = orders[:, done:now]
            sample = self._denoised(states, order, noises, guidance_at(self.scale, places, left))
            there = order.to(model.device)[..., None].expand_as(sample)
            latents.scatter_(1, there, sample.to(kind))
            done = now
            if on_iteration is not None and not on_iteration(done, latents):
                break
        return latents

    def _denoised(
        self, states: Tensor, selection: Tensor, noises: Sequence[NoiseStream], scale: float
    ) -> Tensor:
        """Denoise the latents [B, m, D] at places i64 [B, m], from states [C * B, N, H]."""
        rows, count = selection.shape
        picked = selection.to(states.device).repeat(self.copies, 1)[..., None]
        states = states.gather(1, picked.expand(-1, -1, states.shape[-1]))
        kind = torch.promote_types(states.dtype, torch.float32)
        pairs = zip(noises, selection.tolist(), strict=True)
        noise = torch.cat([self.noise(one, places) for one, places in pairs])
        noise = noise.to(states.device, kind)
        sampler = self.open_sampler(scale)
        conditioning = sampler.conditioning(
            states.reshape(self.copies, rows, count, -1).permute(1, 2, 0, 3)
        )
        return sampler.draw(conditioning.flatten(0, 1), noise).latents.reshape(rows, count, -1)

    def open_sampler(self, scale: float) -> NoiseSampler:
        """Return the sampler of an iteration under a scale of guidance."""
        return NoiseSampler(self.model, self.schedule, scale, self.temperature)

    def noise(self, noise: NoiseStream, places: Sequence[int]) -> Tensor:
        """Return normal numbers f64 [n, T + 1, D] for the latents at n places."""
        return path_noise(noise, places, self.schedule.steps, self.model.config.latent_dim)


def order_of(noise: NoiseStream, places: int) -> Tensor:
    """Return the order i64 [N] in which an image's places are generated, from its seed."""
    return noise.normal([0], torch.arange(places)[None], NoiseUse.ORDER)[0].argsort()
