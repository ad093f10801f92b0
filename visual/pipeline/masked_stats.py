"""The figures of a call over masked latents, plain or speculative, and where latents stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.reports.report import Report
from ragspec.sampling.noise import NoiseStream
from ragspec.visual.masked.sampler import order_of
from ragspec.visual.pipeline.latent_stats import DraftFigures


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

    @property
    def excess(self) -> NDArray[np.float64]:
        """Total variation is not measured of latents: NaN, [B, h, w]."""
        return np.full(self.outcomes.shape, np.nan)

    @property
    def tv_excess(self) -> float | None:
        """None, as for all latents."""
        return None

    @property
    def nll_gaps(self) -> NDArray[np.float64]:
        """No latent has a surprise: [0]."""
        return np.zeros(0)

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
