"""The iterations of a masked model, and the denoising steps of its latents (MAR, Li et al.).

As published (arXiv 2406.11838): guidance mixes only the predicted noise of the conditional and the
unconditional row, the variance is that of the conditional row. The steps are those of improved DDPM
(Nichol and Dhariwal, arXiv 2102.09672): T of 1,000 steps on the cosine schedule. The network
predicts the noise and the variance of a step between its bounds. The last step has no noise. The
places per iteration follow MaskGIT's cosine (Chang et al., arXiv 2202.04200).
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.visual.checks import bounded, check_setting, checked_whole
from ragspec.visual.latents.sampler import OFFSET, Sampler, path_noise
from ragspec.visual.masked.model import MaskedModel

TRAINED = 1000  # steps that the network was trained on
FLOOR = 0.1  # a deviation that costs an image 0.1 dB, see benchmarks/RESULTS.md
_MOST_BETA = 0.999  # of a step; 1 would lead to a division by zero

Step = int | Tensor


class LearnedSchedule:
    """T of the 1,000 steps; states are numbered T (noise) down to 0 (the latent).

    Entry t - 1 of the tables f64 [T] belongs to the distribution of x_(t - 1) given x_t: times (the
    network's input), alphas_cumprod (the latent's share of the variance), to_clean and to_noisy
    (factors of the mean), least and most (bounds of the log variance).

    Args:
        floor: The deviation of the last step, 0 as published. A positive floor is another
            distribution, in which latents have a density, so that drafts can be judged.

    Raises:
        InputError: There are fewer than 2 or over 1,000 steps, or floor is not from 0 to below 1.
    """

    def __init__(self, steps: int = 100, floor: float = 0.0) -> None:
        check_setting("floor", floor)
        self.floor = float(floor)
        self.steps = count = checked_whole(steps, "steps", 2, TRAINED)
        stride = (TRAINED - 1) / (count - 1)
        self.times = [round(step * stride) for step in range(count)]
        times = torch.arange(TRAINED + 1, dtype=torch.float64) / TRAINED
        signal = ((times + OFFSET) / (1.0 + OFFSET) * (math.pi / 2.0)).cos().square()
        added = (1.0 - signal[1:] / signal[:-1]).clamp(max=_MOST_BETA)  # the noise of each step
        self.alphas_cumprod = (1.0 - added).cumprod(0)[self.times]
        before = torch.cat([self.alphas_cumprod.new_ones(1), self.alphas_cumprod[:-1]])
        betas = 1.0 - self.alphas_cumprod / before
        self.to_clean = betas * before.sqrt() / (1.0 - self.alphas_cumprod)
        self.to_noisy = (1.0 - before) * (1.0 - betas).sqrt() / (1.0 - self.alphas_cumprod)
        variance = betas * (1.0 - before) / (1.0 - self.alphas_cumprod)
        variance[0] = variance[1]  # the last step's is 0, which has no logarithm
        self.least, self.most = variance.log(), betas.log()

    # Below, `step` may also be a tensor of steps i64 [n] or [1] for rows [n, D].

    def clean(self, step: Step, noisy: Tensor, noise: Tensor) -> Tensor:
        """Return the latents [..., D], given states x_step and their predicted noise."""
        noise_factor = _at((1.0 - self.alphas_cumprod).sqrt(), step, noisy)
        return (noisy - noise_factor * noise) / _at(self.alphas_cumprod.sqrt(), step, noisy)

    def mean(self, step: Step, noisy: Tensor, clean: Tensor) -> Tensor:
        """Return the mean [..., D] of x_(step - 1), given x_step and the latent."""
        return _at(self.to_clean, step, noisy) * clean + _at(self.to_noisy, step, noisy) * noisy

    def log_variance(self, step: Step, variance: Tensor) -> Tensor:
        """Map predicted variances [..., D] of x_(step - 1), -1 to 1, to log variances."""
        least, most = _at(self.least, step, variance), _at(self.most, step, variance)
        return least + (variance + 1.0) / 2.0 * (most - least)

    def deviation(self, step: Step, variance: Tensor) -> Tensor:
        """Map predicted variances [..., D] to deviations of x_(step - 1), the floor in step 1."""
        deviation = (0.5 * self.log_variance(step, variance)).exp()
        last = torch.as_tensor(step, device=variance.device) == 1
        return torch.where(last[..., None], self.floor, deviation)


def _at(table: Tensor, step: Step, like: Tensor) -> Tensor:
    """Return the entry of a table f64 [T] for a step, or the entries [n, 1] for steps [n]."""
    return table[step - 1].to(like)[..., None]


def masked_counts(places: int, iterations: int) -> list[int]:
    """Count the places that each iteration leaves masked; raise InputError for too many or 0."""
    count = checked_whole(iterations, "iterations", 1, places)  # each draws one at least
    left, counts = places, []
    for done in range(1, count):
        masked = math.floor(places * math.cos(math.pi / 2.0 * done / count))
        left = max(1, min(left - 1, masked))
        counts.append(left)
    return [*counts, 0]


def guidance_at(scale: float, places: int, left: int) -> float:
    """Return the guidance scale of an iteration after which `left` places are masked.

    It rises from 1 linearly with the share of generated latents; the last has one masked place.
    """
    return 1.0 + (scale - 1.0) * (places - max(1, left)) / places


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
        return torch.as_tensor(self.head.cond_embed(states))

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


class MaskedSampler:
    """Generates without drafts, as published (MAR, Li et al., arXiv 2406.11838, sections 3.3, 4).

    Args:
        iterations: Forwards of the model; latents of one iteration are sampled independently.
        scale: Of guidance, which rises linearly from 1 with the share of generated latents; 1 runs
            the conditional rows alone.
        temperature: See `NoiseSampler`.

    Raises:
        InputError: There are more iterations than places, or none.
    """

    def __init__(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        iterations: int = 64,
        scale: float = 1.0,
        temperature: float = 1.0,
    ) -> None:
        self.model, self.schedule = model, schedule
        self.left = masked_counts(model.places, iterations)
        self.scale, self.temperature = float(scale), temperature
        self.copies = 1 if self.scale == 1.0 else 2

    @torch.no_grad()
    def draw(self, labels: Tensor, noises: Sequence[NoiseStream]) -> Iterator[tuple[int, Tensor]]:
        """Yield the number of generated latents and all of them after each iteration.

        Those are standardised, f32 [B, N, D], or f64 with a float64 model; 0 for missing ones.

        Args:
            labels i64 [B]: The class of each image.
        """
        model, rows, places = self.model, len(labels), self.model.places
        condition = model.condition(labels, self.copies)
        orders = torch.stack([order_of(noise, places) for noise in noises])
        width, kind = model.config.latent_dim, torch.promote_types(model.dtype, torch.float32)
        latents = torch.zeros(rows, places, width, dtype=kind, device=model.device)
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
            yield done, latents

    def _denoised(
        self, states: Tensor, selection: Tensor, noises: Sequence[NoiseStream], scale: float
    ) -> Tensor:
        """Denoise the latents [B, m, D] at places i64 [B, m], from states [C * B, N, H]."""
        rows, count = selection.shape
        picked = selection.to(states.device).repeat(self.copies, 1)[..., None]
        states = states.gather(1, picked.expand(-1, -1, states.shape[-1]))
        pairs = zip(noises, selection.tolist(), strict=True)
        sizes = self.schedule.steps, self.model.config.latent_dim
        noise = torch.cat([path_noise(one, places, *sizes) for one, places in pairs])
        noise = noise.to(states.device, torch.promote_types(states.dtype, torch.float32))
        sampler = NoiseSampler(self.model, self.schedule, scale, self.temperature)
        states = states.reshape(self.copies, rows, count, -1).permute(1, 2, 0, 3)
        conditioning = sampler.conditioning(states)
        return sampler.draw(conditioning.flatten(0, 1), noise).latents.reshape(rows, count, -1)


def order_of(noise: NoiseStream, places: int) -> Tensor:
    """Return the order i64 [N] in which an image's places are generated, from its seed."""
    return noise.normal([0], torch.arange(places)[None], NoiseUse.ORDER)[0].argsort()
