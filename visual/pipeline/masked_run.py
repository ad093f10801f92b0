"""One batch of pictures of a masked model, drawn plainly or with drafts, and batches together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.engine.output import Generation
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.masked.sampler import MaskedSampler
from ragspec.visual.models.raster import Raster
from ragspec.visual.pipeline.latent_stats import fates
from ragspec.visual.pipeline.masked_drafts import MaskedProgress, latents_of
from ragspec.visual.pipeline.output import acceptance_of
from ragspec.visual.pipeline.progress import check_returned


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
    """Pictures that a `MaskedLatentPipeline` draws side by side: labels i64 [b], a seed each.

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
            pipe.model,
            pipe.schedule,
            self.labels,
            self.seeds,
            sampler.scale,
            sampler.temperature,
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
