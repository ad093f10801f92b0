"""How `MaskedLatentPipeline` draws with drafts: who drafts, and one run of the engine a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.drafters.base import Drafter
from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.visual.checks import checked_count, is_number
from ragspec.visual.drafting.latent_model import LatentDrafter, MaskedJacobiDrafter
from ragspec.visual.latents.judged import Watched, Watching
from ragspec.visual.latents.rules.by_name import Near
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.sampler import MaskedSampler
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.masked.target import MaskedTarget
from ragspec.visual.models.raster import Raster
from ragspec.visual.pipeline.folder import ImageFolder, load_masked
from ragspec.visual.pipeline.latent_source import ROUNDED, draft_folder
from ragspec.visual.pipeline.output import acceptance_of
from ragspec.visual.pipeline.progress import Progress, check_returned
from ragspec.visual.pipeline.stats import fates

JACOBI = "jacobi"
WINDOW = 4  # latents of a draft; each costs a masked prefix of the forward that verifies it
DRAFTERS = ("auto", JACOBI, "model", "none")
_SAME = ("latent_dim", "grid_size", "num_classes", "mean", "deviation")


class WatchedMaskedTarget(Watching, MaskedTarget):
    """A masked target that knows how each committed latent of the call was judged."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedDrafts:
    """What drafts for a masked model, and what judges the drafts.

    source: "jacobi" or the smaller model. window: latents of a draft, at most. prefill: share of
    the latents that the target draws alone before drafting begins. Raises InputError.
    """

    source: str | MaskedModel
    rule: Rule
    window: int = WINDOW
    prefill: float = 0.0

    def __post_init__(self) -> None:
        checked_count(self.window, "window")
        if not is_number(self.prefill) or not 0.0 <= self.prefill < 1.0:
            raise InputError(
                f"got prefill {self.prefill!r}; expected a share of the latents from 0 to below 1, "
                "such as 0.05."
            )

    @property
    def name(self) -> str:
        """Who drafts: "jacobi" or "model"."""
        return self.source if isinstance(self.source, str) else "model"

    def check(self, schedule: LearnedSchedule, temperature: float) -> None:
        """Raise InputError where the rule compares densities and there are none."""
        if isinstance(self.rule, Near) or (schedule.floor and temperature):
            return
        lacking = "floor 0" if temperature else f"temperature {temperature:g}"
        raise InputError(
            f"got the rule {self.rule.name!r} with {lacking}; expected noise in the last denoising "
            "step: without any, a latent has no density and no draft can be judged. Set floor=0.1 "
            "(for plain drawing too, as it is another law) and a temperature above 0, or "
            "rule='near'."
        )

    def target(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        labels: torch.Tensor,
        seeds: Sequence[int],
        scale: float,
        temperature: float,
    ) -> WatchedMaskedTarget:
        """Return the target of some images."""
        noises = [NoiseStream(seed) for seed in seeds]
        ahead = self.window if isinstance(self.source, str) else 0
        return WatchedMaskedTarget(model, schedule, labels, noises, scale, temperature, ahead=ahead)

    def drafter(self, target: MaskedTarget) -> Drafter:
        """Return what drafts for a target."""
        begin = ceil(self.prefill * target.model.places)
        if isinstance(self.source, str):
            return MaskedJacobiDrafter(target, self.window, begin=begin)
        smaller = MaskedTarget(
            self.source,
            target.schedule,
            target.labels,
            target.noises,
            target.guidance_scale,
            target.temperature,
            table=target.table,
        )
        return LatentDrafter(smaller, target, self.window, begin=begin)

    def draw(
        self,
        target: WatchedMaskedTarget,
        on_step: Callable[..., None],
        interrupted: Callable[[], bool],
    ) -> list[Generation]:
        """Draw all images of a target, one batch."""
        count = len(target.noises)
        engine = Engine(
            target,
            None,
            self.drafter(target),
            budget=self.window,
            rule=Watched(self.rule),
            batch_size=count,
        )
        sampling = Sampling(temperature=1.0, seed=[noise.seed for noise in target.noises])
        options: dict[str, Any] = {"max_new_tokens": target.model.places, "ignore_eos": True}
        options["stopping_criteria"] = [lambda ids, scores: interrupted()]
        prompts = [target.prompt(picture) for picture in range(count)]
        sample: list[Generation] = engine.generate(prompts, sampling, on_step=on_step, **options)
        return sample


def window_of(budget: Any) -> int:
    """Return the window that a budget of draft nodes stands for: a number, or "auto".

    Raises InputError for another one.
    """
    if budget == "auto":
        return WINDOW
    try:
        return checked_count(int(budget), "budget")
    except (TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(
            f"got the budget {budget!r}; expected auto, or the latents of a draft."
        ) from error


class MaskedProgress(Progress):
    """Tells a callback the latents of the batch that is drawn."""

    def __init__(self, target: MaskedTarget, *args: Any) -> None:
        super().__init__(*args)
        self._target = target

    def step_tensors(self, first: int) -> dict[str, torch.Tensor]:
        """Return the latents [b, N, D] that stand, 0 where none does."""
        return {"latents": latents_of(self._target, [row[row >= 0] for row in self._codes])}


def latents_of(target: MaskedTarget, numbers: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the latents [B, N, D] by place that have these numbers, in the order of images."""
    table = target.table
    result = table.latents.new_zeros(len(numbers), target.model.places, table.paths.shape[-1])
    for row, order, known in zip(result, target.orders, numbers, strict=True):
        row[order[: len(known)].to(result.device)] = table.latents[known.to(result.device)]
    return result


def masked_source(
    drafter: Any, model: MaskedModel, folder: ImageFolder | None
) -> str | MaskedModel | None:
    """Return who drafts: "jacobi", a smaller model, or None for plain drawing.

    drafter: "jacobi" (also "auto"), "model" (of the folder's draft/), the folder of a draft model,
    a `MaskedModel`, a list of one of these, or None or "none". Raises UnknownNameError,
    ModelNotFoundError, InputError.
    """
    if isinstance(drafter, list | tuple):
        if len(drafter) > 1:
            raise InputError(
                f"got {len(drafter)} drafters of latents; expected one: drafts are chains."
            )
        drafter = drafter[0] if drafter else None
    if drafter is None or drafter == "none":
        return None
    if drafter in ("auto", JACOBI):
        return JACOBI
    if isinstance(drafter, str | Path):
        drafter = load_masked(draft_folder(drafter, folder, DRAFTERS), model.device, model.dtype)
    if not isinstance(drafter, MaskedModel):
        raise InputError(
            f"got a {type(drafter).__name__} as drafter of a masked model; expected one of "
            f"{', '.join(DRAFTERS)}, the folder of a smaller masked model, or a MaskedModel."
        )
    for name in _SAME:
        ours, theirs = (
            torch.tensor(getattr(each.config, name), dtype=torch.float64)
            for each in (model, drafter)
        )
        if ours.shape != theirs.shape or not torch.allclose(ours, theirs, ROUNDED, ROUNDED):
            raise InputError(
                f"got a draft model with {name} {theirs.tolist()}; expected {ours.tolist()}, the "
                "target's. Draft with a model that was trained on the same latents."
            )
    return drafter


@dataclass(frozen=True, slots=True)
class SampledLatents:
    """Standardised latents [B, N, D] by place; the rest [B, N] by index, see `MaskedStats`."""

    latents: torch.Tensor
    maps: NDArray[np.int64]
    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]
    prefixes: int
    generations: Sequence[Generation] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Images that a `MaskedLatentPipeline` draws in one batch: labels i64 [b], a seed each.

    bar, callback: told what stands.
    """

    pipeline: Any
    sampler: MaskedSampler
    labels: torch.Tensor
    seeds: Sequence[int]
    bar: Any
    callback: Callable[..., Any] | None

    def plain(self) -> SampledLatents:
        """Draw in the iterations of the sampler."""
        sampler, count = self.sampler, len(self.seeds)
        follow = _Follower(self.pipeline, self.bar, count, self.callback)
        latents = sampler.draw(self.labels, [NoiseStream(seed) for seed in self.seeds], follow)
        sizes = -np.diff(np.array([latents.shape[1], *sampler.left]))
        maps = np.tile(np.repeat(sizes, sizes), (count, 1))
        none = np.zeros_like(maps), np.full(maps.shape, np.nan)
        return SampledLatents(latents, maps, *none, count * len(sampler.left))

    def speculative(self) -> SampledLatents:
        """Draw with the drafts of the pipeline."""
        pipe, count, sampler = self.pipeline, len(self.seeds), self.sampler
        target = pipe.drafts.target(
            pipe.model, pipe.schedule, self.labels, self.seeds, sampler.scale, sampler.temperature
        )
        places = target.model.places
        follow = MaskedProgress(target, pipe, self.bar, count, places, count, self.callback)
        result = pipe.drafts.draw(target, follow.step, lambda: pipe._interrupt)
        follow.finish()
        latents = latents_of(target, [torch.tensor(each.tokens) for each in result])
        maps = acceptance_of(result, Raster(pipe.side, pipe.side)).reshape(count, -1)
        message = fates(result, target, pipe.rule, places)
        return SampledLatents(latents, maps, *message, target.prefixes, result)


def joined(parts: Sequence[SampledLatents], count: int) -> SampledLatents:
    """Return batches as one; images of batches that were not drawn are 0, and have no drafts."""
    latents = torch.cat([part.latents for part in parts])
    lacking = count - len(latents)
    rows = [np.concatenate(each) for each in zip(*map(_rows, parts), strict=True)]
    fills: tuple[float, ...] = (0, -1, np.nan)
    maps, outcomes, distances = (
        np.concatenate([row, np.full((lacking, row.shape[1]), fill, row.dtype)])
        for row, fill in zip(rows, fills, strict=True)
    )
    latents = torch.cat([latents, latents.new_zeros(lacking, *latents.shape[1:])])
    sample = [each for part in parts for each in part.generations]
    return SampledLatents(
        latents, maps, outcomes, distances, sum(part.prefixes for part in parts), sample
    )


def _rows(part: SampledLatents) -> tuple[NDArray[Any], ...]:
    return part.maps, part.outcomes, part.distances


class _Follower:
    """The progress bar of a batch, and the callback after each of its iterations."""

    def __init__(
        self, pipeline: Any, bar: Any, rows: int, callback: Callable[..., Any] | None
    ) -> None:
        self._pipeline, self._bar, self._rows, self._callback = pipeline, bar, rows, callback
        self._iteration = self._done = 0

    def __call__(self, done: int, latents: torch.Tensor) -> bool:
        self._bar.update(self._rows * (done - self._done))
        self._done = done
        if self._callback is not None:
            record = {"latents": latents.clone()}
            returned = self._callback(self._pipeline, self._iteration, done, record)
            check_returned(returned, "latents", latents)
        self._iteration += 1
        return not self._pipeline._interrupt
