"""Statistics of one call over latents, causal or masked, plain or speculative."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.reports.generation import Generation
from ragspec.reports.report import Report, kind_of_label
from ragspec.rules.base import Rule
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.latents.judged import OUTCOMES, RecordingTarget
from ragspec.visual.masked.sampler import order_of
from ragspec.visual.pipeline.output import ImageStats
from ragspec.visual.rules.tv_budget import APPROXIMATE


class DraftFigures:
    """The base of statistics with outcomes and distances of drafted latents."""

    __slots__ = ()
    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]

    @property
    def acceptance(self) -> float | None:
        """The share of judged drafts that were accepted; None without drafts."""
        accepted = int((self.outcomes == OUTCOMES.index("accepted")).sum())
        judged = int((self.outcomes > 0).sum())
        return accepted / judged if judged else None

    @property
    def distance_mean(self) -> float | None:
        """The mean distance of accepted latents; None if none was measured."""
        return None if np.isnan(self.distances).all() else float(np.nanmean(self.distances))

    @property
    def distance_most(self) -> float | None:
        """The largest distance of an accepted latent; None if none was measured."""
        return None if np.isnan(self.distances).all() else float(np.nanmax(self.distances))

    def draft_summary(self) -> str:
        """Return the part of the summary about drafts; empty if no distance was measured."""
        if self.distance_mean is None:
            return ""
        return (
            f", {self.acceptance:.0%} of drafts accepted, {self.distance_mean:.4f} from the target "
            f"on average, {self.distance_most:.4f} at most"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentStats(DraftFigures, ImageStats):
    """`ImageStats` with the outcomes of drafted latents.

    Attributes:
        outcomes i64 [B, h, w]: Indices into `OUTCOMES`, -1 where no latent was generated.
        distances f64 [B, h, w]: How far latents that an approximate rule accepted are from the
            target's own, in deviations of the latents; NaN elsewhere and under lossless rules.
    """

    outcomes: NDArray[np.int64]
    distances: NDArray[np.float64]

    def summary(self) -> str:
        """Return a summary of one line."""
        # dataclass(slots=True) creates the class anew, which breaks super().
        return ImageStats.summary(self) + self.draft_summary()


def fates(
    generations: Sequence[Generation], target: RecordingTarget, rule: Rule, places: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return outcomes i64 and distances f64 [B, N] of latents in the order of generation."""
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
    """Statistics of one call of a masked model; B images of N latents.

    Attributes:
        seeds: One for each image.
        places: N.
        iterations: Forwards for each image in plain decoding; N under a rule.
        steps, floor: Denoising steps of each latent, and the deviation of the last step.
        seconds: Wall time of the latents, without decoding the images.
        outcomes, distances: See `LatentStats`.
        prefixes: Masked prefixes that the model read for all images; a forward that verifies n
            drafts reads n + 1.
        reports: One for each image under a rule, none in plain decoding.
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
        """Forward passes over all images; a pass over several counts for each of them."""
        if self.reports:
            return sum(report.forward_passes for report in self.reports)
        return len(self.seeds) * self.iterations

    @property
    def codes_per_forward(self) -> float:
        """Latents per forward pass."""
        return len(self.seeds) * self.places / max(1, self.forwards)

    @property
    def repeatable(self) -> bool:
        """Whether the same seeds give the same images again, which is always true."""
        return True

    def summary(self) -> str:
        """Return a summary of one line."""
        count = len(self.seeds)
        line = (
            f"{count} image{'s' * (count > 1)}, {self.forwards} forward passes, "
            f"{self.codes_per_forward:.2f} latents a pass, {self.seconds:.2f} s"
        )
        if self.reports:
            line += f", {self.prefixes / max(1, self.forwards):.2f} masked prefixes a pass"
        return line + self.draft_summary()


def placed(values: NDArray[Any], seeds: Sequence[int]) -> NDArray[Any]:
    """Reorder values [B, N] from the order of generation to the grid [B, h, w]."""
    places = values.shape[1]
    grid = np.empty_like(values)
    for row, seed in enumerate(seeds):
        grid[row, order_of(NoiseStream(seed), places).numpy()] = values[row]
    side = int(np.sqrt(places))
    return grid.reshape(-1, side, side)
