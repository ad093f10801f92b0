"""How `MaskedLatentPipeline` draws with drafts: who drafts, and one run of the engine a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.visual.checks import checked_count
from ragspec.visual.latents.judged import Watched, Watching
from ragspec.visual.latents.rules.by_name import Near
from ragspec.visual.masked.model import MaskedModel
from ragspec.visual.masked.sampler import MaskedSampler
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.masked.target import MaskedTarget
from ragspec.visual.models.raster import Raster
from ragspec.visual.pipeline.drafter_choice import DraftSource
from ragspec.visual.pipeline.output import acceptance_of
from ragspec.visual.pipeline.progress import Progress, check_returned
from ragspec.visual.pipeline.stats import fates

WINDOW = 4  # latents of a draft; each costs a masked prefix of the forward that verifies it


class WatchedMaskedTarget(Watching, MaskedTarget):
    """A masked target that knows how each committed latent of the call was judged."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedDrafts:
    """What drafts for a masked model, and what judges the drafts.

    window: latents of a draft, at most. prefill: share of the latents that the target draws alone
    before drafting begins.
    """

    source: DraftSource
    rule: Rule
    window: int = WINDOW
    prefill: float = 0.0

    def check(self, schedule: LearnedSchedule, temperature: float) -> None:
        """Raise InputError where the rule compares densities and there are none."""
        if isinstance(self.rule, Near) or (schedule.floor and temperature):
            return
        lacking = "floor 0" if temperature else f"temperature {temperature:g}"
        raise InputError(
            f"got the rule {self.rule.name!r} with {lacking}; expected noise in the last denoising "
            "step: without any, a latent has no density and no draft can be judged. Set floor=0.1 "
            "(for plain drawing too, as it is another distribution) and a temperature above 0, or "
            "rule='near'."
        )

    def target(
        self,
        model: MaskedModel,
        schedule: LearnedSchedule,
        labels: Tensor,
        seeds: Sequence[int],
        scale: float,
        temperature: float,
    ) -> WatchedMaskedTarget:
        """Return the target of some images."""
        noises = [NoiseStream(seed) for seed in seeds]
        ahead = self.window if self.source.model is None else 0
        return WatchedMaskedTarget(model, schedule, labels, noises, scale, temperature, ahead=ahead)

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
            self.source(target),
            budget=self.window,
            rule=Watched(self.rule),
            batch_size=count,
        )
        sampling = Sampling(temperature=1.0, seed=[noise.seed for noise in target.noises])
        options: dict[str, Any] = {"max_new_tokens": target.model.places, "ignore_eos": True}
        options["stopping_criteria"] = [lambda ids, scores: interrupted()]
        prompts = [target.prompt(picture) for picture in range(count)]
        generations: list[Generation] = engine.generate(
            prompts, sampling, on_step=on_step, **options
        )
        return generations


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

    def step_tensors(self, first: int) -> dict[str, Tensor]:
        """Return the latents [b, N, D] that stand, 0 where none does."""
        return {"latents": latents_of(self._target, [row[row >= 0] for row in self._codes])}


def latents_of(target: MaskedTarget, numbers: Sequence[Tensor]) -> Tensor:
    """Return the latents [B, N, D] by place that have these numbers, in the order of images."""
    table = target.table
    result = table.latents.new_zeros(len(numbers), target.model.places, table.paths.shape[-1])
    for row, order, known in zip(result, target.orders, numbers, strict=True):
        row[order[: len(known)].to(result.device)] = table.latents[known.to(result.device)]
    return result


@dataclass(frozen=True, slots=True)
class SampledLatents:
    """Standardised latents [B, N, D] by place; the rest [B, N] by index, see `MaskedStats`."""

    latents: Tensor
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
    labels: Tensor
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
        outcome = fates(result, target, pipe.rule, places)
        return SampledLatents(latents, maps, *outcome, target.prefixes, result)


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
    generations = [each for part in parts for each in part.generations]
    return SampledLatents(
        latents, maps, outcomes, distances, sum(part.prefixes for part in parts), generations
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

    def __call__(self, done: int, latents: Tensor) -> bool:
        self._bar.update(self._rows * (done - self._done))
        self._done = done
        if self._callback is not None:
            record = {"latents": latents.clone()}
            returned = self._callback(self._pipeline, self._iteration, done, record)
            check_returned(returned, "latents", latents)
        self._iteration += 1
        return not self._pipeline._interrupt
