"""Draws pictures with a masked model: a few places an iteration, in an order of the seed's.

Order and noise go by (seed, sample, place, step, number): a picture is the same whatever else is in
its batch, and its noise at a place is the same however many iterations there are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ragspec.errors import InputError
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.visual.checks import is_number
from ragspec.visual.masked.denoising import NoiseSampler
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule, guidance_at, masked_counts

OnIteration = Callable[[int, torch.Tensor], bool]
"""Places drawn so far and latents [B, N, D], 0 where none stands: whether to go on."""


class MaskedSampler:
    """Plain drawing, as published (MAR, Li et al., arXiv 2406.11838, sections 3.3 and 4).

    iterations: forwards of the model; the places of one are drawn independently of each other.
    schedule: of the denoising. scale: of guidance (1 runs the conditional rows alone), which mixes
    the predicted noise and rises linearly with what is drawn, see `NoiseSampler`. temperature: of
    the noise of the steps, not of the state that they begin with.
    Raises InputError.
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
            if not is_number(value) or not 0.0 <= value < float("inf"):
                raise InputError(f"got {name} {value!r}; expected a number, 0 or more.")
        self.model, self.schedule = model, schedule
        self.left = masked_counts(model.places, iterations)
        self.scale, self.temperature = float(scale), float(temperature)
        self.copies = 1 if self.scale == 1.0 else 2

    @torch.no_grad()
    def draw(
        self,
        labels: torch.Tensor,
        noises: Sequence[NoiseStream],
        on_iteration: OnIteration | None = None,
    ) -> torch.Tensor:
        """Return standardised latents f32 [B, N, D] of classes i64 [B], a noise for each.

        on_iteration: called after each; False ends the drawing, and leaves the rest 0. float64
        models give float64.
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
            selection = orders[:, done:now]
            sample = self._denoised(
                states, selection, noises, guidance_at(self.scale, places, left)
            )
            there = selection.to(model.device)[..., None].expand_as(sample)
            latents.scatter_(1, there, sample.to(kind))
            done = now
            if on_iteration is not None and not on_iteration(done, latents):
                break
        return latents

    def _denoised(
        self,
        states: torch.Tensor,
        selection: torch.Tensor,
        noises: Sequence[NoiseStream],
        scale: float,
    ) -> torch.Tensor:
        """Return latents [B, m, D] at the wanted places i64 [B, m] of states [C * B, N, H]."""
        rows, count = selection.shape
        picked = selection.to(states.device).repeat(self.copies, 1)[..., None]
        result = states.gather(1, picked.expand(-1, -1, states.shape[-1]))
        kind = torch.promote_types(states.dtype, torch.float32)
        noise = torch.cat(
            [
                self.noise(one, places)
                for one, places in zip(noises, selection.tolist(), strict=True)
            ]
        ).to(states.device, kind)
        sampler = self.open_sampler(scale)
        message = sampler.conditioning(
            result.reshape(self.copies, rows, count, -1).permute(1, 2, 0, 3)
        )
        return sampler.draw(message.flatten(0, 1), noise).latents.reshape(rows, count, -1)

    def open_sampler(self, scale: float) -> NoiseSampler:
        """Return what denoises latents under a scale of guidance."""
        return NoiseSampler(self.model, self.schedule, scale, self.temperature)

    def noise(self, noise: NoiseStream, places: Sequence[int]) -> torch.Tensor:
        """Return the normal numbers of the latents at some places: f64 [n, T + 1, D]."""
        steps, width = self.schedule.steps + 1, self.model.config.latent_dim
        lanes = torch.arange(steps * width).expand(len(places), -1)
        return noise.normal_rows(places, lanes).reshape(len(places), steps, width)


def order_of(noise: NoiseStream, places: int) -> torch.Tensor:
    """Return the order in which places are drawn, by the seed: i64 [N]."""
    return noise.normal_rows([0], torch.arange(places)[None], NoiseUse.ORDER)[0].argsort()
