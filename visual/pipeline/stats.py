"""The figures of one call over latents, causal or masked, plain or speculative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.engine.output import Generation
from ragspec.reports.report import Report, kind_of_label
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.latents.judged import OUTCOMES, WatchedTarget, Watching
from ragspec.visual.masked.sampler import order_of
from ragspec.visual.pipeline.output import ImageStats
from ragspec.visual.rules.tv_budget import APPROXIMATE


class DraftFigures:
    """What became of the drafts of latents: a base of statistics that have these two."""

    __slots__ = ()
    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]

    @property
    def acceptance(self) -> float | None:
        """Drafts that stayed, of those that were judged; None without drafts."""
        accepted = int((self.outcomes == OUTCOMES.index("accepted")).sum())
        judged = int((self.outcomes > 0).sum())
        return accepted / judged if judged else None

    @property
    def distance_mean(self) -> float | None:
        """The mean distance of kept latents; None where none is told."""
        return None if np.isnan(self.distances).all() else float(np.nanmean(self.distances))

    @property
    def distance_most(self) -> float | None:
        """The largest distance of a kept latent; None where none is told."""
        return None if np.isnan(self.distances).all() else float(np.nanmax(self.distances))

    def draft_summary(self) -> str:
        """Return the end of a line for people; empty where no distance is told."""
        if self.distance_mean is None:
            return ""
        return (
            f", {self.acceptance:.0%} of drafts accepted, {self.distance_mean:.4f} from the target "
            f"on average, {self.distance_most:.4f} at most"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentStats(DraftFigures, ImageStats):
    """See `ImageStats`. outcomes i64 [B, h, w]: places in `OUTCOMES`, -1 where nothing was drawn.

    distances f64 [B, h, w]: how far the latents that an approximate rule kept are from the
    target's own, in deviations of the latents; NaN elsewhere, and under lossless rules.
    """

    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]

    def summary(self) -> str:
        """Return one line for people."""
        # Classes with slots are made again: super() is lost.
        return ImageStats.summary(self) + self.draft_summary()


def latent_stats(
    stats: ImageStats,
    generations: Sequence[Generation],
    target: WatchedTarget,
    rule: Rule,
    side: int,
) -> LatentStats:
    """Return the figures of images of side * side latents, drawn with a rule."""
    known = {field.name: getattr(stats, field.name) for field in fields(ImageStats)}
    outcomes, distances = fates(generations, target, rule, side * side)
    shape = (-1, side, side)
    return LatentStats(
        **known, outcomes=outcomes.reshape(shape), distances=distances.reshape(shape)
    )


def fates(
    generations: Sequence[Generation], target: Watching, rule: Rule, places: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return outcomes and distances of images by the index of their latents: [B, N] both."""
    outcomes = np.full((len(generations), places), -1, dtype=np.int64)
    distances = np.full(outcomes.shape, np.nan)
    for row, generation in enumerate(generations):
        numbers = list(generation.tokens)
        outcomes[row, : len(numbers)] = [target.outcome(number, rule) for number in numbers]
        if kind_of_label(generation.label) == APPROXIMATE and numbers:
            distances[row, : len(numbers)] = target.distances(numbers)
    return outcomes, distances


@dataclass(frozen=True, slots=True)
class MaskedStats(DraftFigures):
    """The figures of one call; B images of N latents.

    seeds: one an image. places: N. iterations: of plain drawing, forwards of the model for each
    image; N under a rule. steps, floor: of the denoising of each latent, and the deviation of the
    last of them. seconds: wall time of the latents, decoding not included. outcomes, distances: see
    `LatentStats`. reports: one an image under a rule, none of plain drawing. prefixes: masked
    prefixes that the model read, over all images; a forward that verifies n drafts reads n + 1.
    """

    seeds: tuple[int, ...]
    places: int
    iterations: int
    steps: int
    seconds: float
    floor: float
    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]
    prefixes: int
    reports: tuple[Report, ...] = ()

    @property
    def forwards(self) -> int:
        """Forward passes over all images; one that served several counts for each of them."""
        if self.reports:
            return sum(report.forward_passes for report in self.reports)
        return len(self.seeds) * self.iterations

    @property
    def codes_per_forward(self) -> float:
        """Latents by forward pass."""
        return len(self.seeds) * self.places / max(1, self.forwards)

    @property
    def repeatable(self) -> bool:
        """Whether the same seeds give the same images again: they do."""
        return True

    def summary(self) -> str:
        """Return one line for people."""
        count = len(self.seeds)
        line = (
            f"{count} image{'s' * (count > 1)}, {self.forwards} forward passes, "
            f"{self.codes_per_forward:.2f} latents a pass, {self.seconds:.2f} s"
        )
        if self.reports:
            line += f", {self.prefixes / max(1, self.forwards):.2f} masked prefixes a pass"
        return line + self.draft_summary()


def placed(values: NDArray[Any], seeds: Sequence[int]) -> NDArray[Any]:
    """Return what belongs to the generated indices of images [B, N] by place: [B, h, w]."""
    places = values.shape[1]
    result = np.empty_like(values)
    for row, seed in enumerate(seeds):
        result[row, order_of(NoiseStream(seed), places).numpy()] = values[row]
    side = int(np.sqrt(places))
    return result.reshape(-1, side, side)
