"""Whole images of a tiny masked model, plain and under rules, for tests of distributions."""

from typing import Any

import torch

from ragspec import Engine, Generation, Sampling
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.drafting.latent_model import LatentDrafter
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.schedule import LearnedSchedule, MaskedSampler
from ragspec.visual.masked.target import MaskedTarget
from tests.support import tiny_masked

SIDE, WIDTH, STEPS, FLOOR, SCALE = 2, 2, 3, 0.3, 2.0
PLACES = SIDE * SIDE
OTHER_SEEDS = 10**6  # of images that share no noise with those under test


class LinearHead(torch.nn.Module):
    """A head whose steps are linear and Gaussian. where: its variances, -1 to 1."""

    def __init__(self, hidden: int, where: float) -> None:
        super().__init__()
        self.cond_embed = torch.nn.Linear(hidden, WIDTH)
        self.input_proj = torch.nn.Linear(WIDTH, 1)
        self.alphas_cumprod = LearnedSchedule(1000).alphas_cumprod
        self.where = where

    def forward(
        self, noisy: torch.Tensor, times: torch.Tensor, message: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the noise of a clean latent: the conditioning and a share of the noisy latent."""
        selected = self.alphas_cumprod[times][:, None]
        clean = message + 0.3 * (1.0 - selected) * noisy
        noise = (noisy - selected.sqrt() * clean) / (1.0 - selected).sqrt()
        return noise, torch.full_like(noisy, self.where)


def model(difference: float = 0.0, side: int = SIDE) -> MaskedModel:
    """Return a model in float64 whose latents depend on each other and are linear in its states.

    difference: added to the conditioning of the head; other than 0 it also changes the variances.
    """
    dice = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[]):
        instance = MaskedModel(tiny_masked.config(WIDTH, grid_size=side, head_layers=1))
    instance.diffloss.net = LinearHead(12, 0.2 if difference else 0.0)
    with torch.no_grad():
        for weight in instance.double().eval().parameters():
            weight.copy_(0.5 * torch.randn(weight.shape, generator=dice, dtype=torch.float64))
        instance.head.cond_embed.bias.add_(difference)
    return instance


def sampled(
    rule: Any,
    drafts: str | None,
    count: int,
    *,
    built_by: type[MaskedTarget] = MaskedTarget,
    difference: float = 0.2,
    spread: float = 1.0,
    side: int = SIDE,
    window: int = 3,
    first: int = 0,
    begin: int = 0,
    **engine: Any,
) -> tuple[torch.Tensor, list[Generation]]:
    """Return pictures f64 [count, N, D] of seeds from `first` on, and their generations.

    drafts: "jacobi", "model" (whose latents are `difference`, and last deviation `spread` times the
    target's) or None.
    """
    instance, schedule = model(side=side), LearnedSchedule(STEPS, FLOOR)
    labels = (torch.arange(count) + first) % 3
    noises = [NoiseStream(seed) for seed in range(first, first + count)]
    ahead = window if drafts == "jacobi" else 0
    target = built_by(instance, schedule, labels, noises, SCALE, ahead=ahead)
    drafter: Any = None
    if drafts == "jacobi":
        drafter = LatentDrafter(None, target, window, 0.0, begin)
    if drafts == "model":
        other = LearnedSchedule(STEPS, spread * FLOOR)
        parts = (model(difference, side=side), other, labels, noises, SCALE)
        smaller = built_by(*parts)
        smaller.table = target.table
        drafter = LatentDrafter(smaller, target, window, 0.0, begin)
    inputs = {"max_batch_size": count} | engine
    result = Engine(target, None, drafter, budget=window, rule=rule, **inputs).generate(
        [target.prompt(picture) for picture in range(count)],
        Sampling(temperature=1.0, seed=[noise.seed for noise in noises]),
        max_new_tokens=instance.places,
        ignore_eos=True,
    )
    return target.by_place(torch.tensor([each.tokens for each in result])), result


def plain(count: int, first: int = OTHER_SEEDS, side: int = SIDE) -> torch.Tensor:
    """Return pictures f64 [count, N, D] of one place an iteration, without the engine."""
    instance, schedule = model(side=side), LearnedSchedule(STEPS, FLOOR)
    noises = [NoiseStream(seed) for seed in range(first, first + count)]
    labels = (torch.arange(count) + first) % 3
    *_, (_, latents) = MaskedSampler(instance, schedule, instance.places, SCALE).draw(
        labels, noises
    )
    return latents


def accepted(result: list[Generation]) -> float:
    """Return the share of drafted latents that stand in the pictures."""
    drafted = sum(each.report.drafted for each in result)
    return sum(each.report.accepted for each in result) / max(1, drafted)
