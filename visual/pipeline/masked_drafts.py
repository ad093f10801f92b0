"""The batches of `MaskedLatentPipeline`, plain or with drafts; each drafted one runs the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.settings import Sampling
from ragspec.visual.checks import checked_count
from ragspec.visual.latents.judged import RecordingRule, RecordingTarget
from ragspec.visual.latents.rules.by_name import Near
from ragspec.visual.masked.sampler import MaskedSampler
from ragspec.visual.masked.schedule import LearnedSchedule
from ragspec.visual.masked.target import MaskedTarget
from ragspec.visual.models.raster import Raster
from ragspec.visual.pipeline.drafter_choice import DraftSource
from ragspec.visual.pipeline.output import acceptance_of
from ragspec.visual.pipeline.progress import Progress, check_returned
from ragspec.visual.pipeline.stats import fates

WINDOW = 4  # latents in a draft; each adds a masked prefix to the forward that verifies it


class RecordingMaskedTarget(RecordingTarget, MaskedTarget):
    """A masked target that records how each committed latent of the call was judged."""


@dataclass(frozen=True, slots=True, eq=False)
class MaskedDrafts:
    """The drafter of a masked model, and the rule that judges its drafts.

    Attributes:
        window: The most latents in a draft.
        prefill: The share of latents that the target generates before drafting.
    """

    source: DraftSource
    rule: Rule
    window: int = WINDOW
    prefill: float = 0.0

    def check(self, schedule: LearnedSchedule, temperature: float) -> None:
        """Raise InputError if the rule compares densities and latents have none."""
        if isinstance(self.rule, Near) or (schedule.floor and temperature):
            return
        lacking = "floor 0" if temperature else f"temperature {temperature:g}"
        raise InputError(
            f"got the rule {self.rule.name!r} with {lacking}; expected noise in the last denoising "
            "step: without any, a latent has no density and no draft can be judged. Set floor=0.1 "
            "(for plain drawing too, as it is another distribution) and a temperature above 0, or "
            "rule='near'."
        )


def window_of(budget: Any) -> int:
    """Return the window for a budget of draft nodes, a number or "auto".

    Raises:
        InputError: The budget is neither.
    """
    try:
        window = WINDOW if budget == "auto" else int(budget)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"got the budget {budget!r}; expected auto, or the latents of a draft."
        ) from error
    return checked_count(window, "budget")


class MaskedProgress(Progress):
    """Reports the latents of the current batch to a callback."""

    def __init__(self, target: MaskedTarget, *args: Any) -> None:
        super().__init__(*args)
        self._target = target

    def step_tensors(self) -> dict[str, Tensor]:
        """Return the latents [b, N, D] for the callback, 0 for those that are missing."""
        return {"latents": latents_of(self._target, [row[row >= 0] for row in self._codes])}


def latents_of(target: MaskedTarget, numbers: Sequence[Tensor]) -> Tensor:
    """Return latents [B, N, D] by place, from the numbers of each image's latents in its order."""
    table = target.table
    latents = table.latents.new_zeros(len(numbers), target.model.places, table.paths.shape[-1])
    for row, order, each in zip(latents, target.orders, numbers, strict=True):
        row[order[: len(each)].to(latents.device)] = table.latents[each.to(latents.device)]
    return latents


@dataclass(frozen=True, slots=True)
class SampledLatents:
    """The latents of a batch and their statistics.

    Attributes:
        latents: Standardised, [B, N, D] by place.
        maps, outcomes, distances: [B, N] in the order of generation, see `MaskedOutput`.
    """

    latents: Tensor
    maps: NDArray[np.int64]
    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]
    prefixes: int
    generations: Sequence[Generation] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The images that a `MaskedLatentPipeline` generates in one batch.

    Attributes:
        labels i64 [b]: The class of each image.
        bar, callback: Report the progress.
    """

    pipeline: Any
    sampler: MaskedSampler
    labels: Tensor
    seeds: Sequence[int]
    bar: Any
    callback: Callable[..., Any] | None

    def plain(self) -> SampledLatents:
        """Generate without drafts, in the iterations of the sampler."""
        sampler, count = self.sampler, len(self.seeds)
        noises = [NoiseStream(seed) for seed in self.seeds]
        latents = sampler.draw(self.labels, noises, _Follower(self))
        sizes = -np.diff(np.array([latents.shape[1], *sampler.left]))
        maps = np.tile(np.repeat(sizes, sizes), (count, 1))
        none = np.zeros_like(maps), np.full(maps.shape, np.nan)
        return SampledLatents(latents, maps, *none, count * len(sampler.left))

    def speculative(self) -> SampledLatents:
        """Generate with the drafter of the pipeline."""
        pipe, sampler, count = self.pipeline, self.sampler, len(self.seeds)
        drafts: MaskedDrafts = pipe.drafts
        target = RecordingMaskedTarget(
            pipe.model,
            pipe.schedule,
            self.labels,
            [NoiseStream(seed) for seed in self.seeds],
            sampler.scale,
            sampler.temperature,
            ahead=drafts.window if drafts.source.model is None else 0,
        )
        places = target.model.places
        progress = MaskedProgress(target, pipe, self.bar, count, places, count, self.callback)
        engine = Engine(
            target,
            None,
            drafts.source(target),
            budget=drafts.window,
            rule=RecordingRule(drafts.rule),
            max_batch_size=count,
        )
        options: dict[str, Any] = {"max_new_tokens": places, "ignore_eos": True}
        options["stopping_criteria"] = [lambda ids, scores: pipe._interrupt]
        generations: list[Generation] = engine.generate(
            [target.prompt(picture) for picture in range(count)],
            Sampling(temperature=1.0, seed=list(self.seeds)),
            on_step=progress.step,
            **options,
        )
        progress.finish()
        latents = latents_of(target, [torch.tensor(each.tokens) for each in generations])
        maps = acceptance_of(generations, Raster(pipe.side, pipe.side)).reshape(count, -1)
        outcome = fates(generations, target, pipe.rule, places)
        return SampledLatents(latents, maps, *outcome, target.prefixes, generations)


def joined(parts: Sequence[SampledLatents], count: int) -> SampledLatents:
    """Concatenate batches; images of missing batches have latents of 0 and no drafts."""
    latents = torch.cat([part.latents for part in parts])
    lacking = count - len(latents)

    def filled(name: str, fill: float) -> NDArray[Any]:
        rows = np.concatenate([getattr(part, name) for part in parts])
        return np.concatenate([rows, np.full((lacking, rows.shape[1]), fill, rows.dtype)])

    return SampledLatents(
        torch.cat([latents, latents.new_zeros(lacking, *latents.shape[1:])]),
        filled("maps", 0),
        filled("outcomes", -1),
        filled("distances", np.nan),
        sum(part.prefixes for part in parts),
        [each for part in parts for each in part.generations],
    )


class _Follower:
    """Updates the progress bar of a batch and calls the callback after each iteration."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._iteration = self._done = 0

    def __call__(self, done: int, latents: Tensor) -> bool:
        batch = self._batch
        batch.bar.update(len(batch.seeds) * (done - self._done))
        self._done = done
        if batch.callback is not None:
            record = {"latents": latents.clone()}
            returned = batch.callback(batch.pipeline, self._iteration, done, record)
            check_returned(returned, "latents", latents)
        self._iteration += 1
        return not batch.pipeline._interrupt
