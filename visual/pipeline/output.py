"""What drawing returns beside the images: forwards, seconds, accepted codes, excess variation."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.reports.report import Report, kind_of_label
from ragspec.visual.models.raster import Raster
from ragspec.visual.rules.tv_budget import position_excess

LABELS = (  # from the strongest to the weakest
    "exact",
    "exact up to rounding",
    "exact-for",
    "exact-for up to rounding",
    "bounded",
    "approximate",
)
UNFINISHED = "unfinished"  # the label of images of which one was interrupted


@dataclass(frozen=True, slots=True)
class ImageStats:
    """The figures of one call; B images of h * w codes.

    reports: one an image. seconds: wall time of the codes, decoding of the images not included.
    excess f64 [B, h, w]: the total variation that a relaxed rule may have added at each code; 0
    under exact rules, NaN under rules that do not measure it. repeatable: whether the same seeds
    give the same images again; a budget that goes by the clock decides what is drafted, and under
    a rule that is not exact that shows. surprises f64 [n]: of each code that was measured, see
    `nll_gap`. seeds: one an image.
    """

    reports: tuple[Report, ...]
    seconds: float
    excess: NDArray[np.float64]
    repeatable: bool = True
    nll_gaps: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))

    @property
    def seeds(self) -> tuple[int | None, ...]:
        """The seed of each image."""
        return tuple(report.seed for report in self.reports)

    @property
    def forwards(self) -> int:
        """Forward passes of the target, the reading of the condition included, over all images.

        A pass that served several images at once counts for each of them.
        """
        return sum(report.forward_passes for report in self.reports)

    @property
    def codes_per_forward(self) -> float:
        """Codes by forward pass of decoding."""
        passes = sum(report.forwards for report in self.reports)
        return sum(report.tokens - 1 for report in self.reports) / max(1, passes)

    @property
    def tv_excess(self) -> float | None:
        """Mean excess a position; None where the rule does not measure it."""
        mean = float(self.excess.mean()) if self.excess.size else 0.0
        return None if np.isnan(mean) else mean

    @property
    def nll_gap(self) -> float | None:
        """Mean of -log p(code) - H(p) over all codes, nats: about 0 without relaxation.

        See `ragspec.visual.rules.surprise`; None where it was not measured.
        """
        return float(self.nll_gaps.mean()) if self.nll_gaps.size else None

    @property
    def nll_gap_error(self) -> float | None:
        """One standard error of `nll_gap`."""
        size = self.nll_gaps.size
        return float(np.sqrt((self.nll_gaps**2).mean() / size)) if size else None

    def summary(self) -> str:
        """Return one line for people."""
        count = len(self.reports)
        line = f"{count} image{'s' * (count > 1)}, {self.forwards} forward passes, "
        line += f"{self.codes_per_forward:.2f} codes a pass, {self.seconds:.2f} s"
        excess = self.tv_excess
        line += f", tv_excess {excess:.4f} a position" if excess else ""
        if excess and self.nll_gap is not None:
            line += f", surprise {self.nll_gap:+.3f} +- {self.nll_gap_error:.3f} nats a code"
        return line + ("" if self.repeatable else ", not repeatable (the budget goes by the clock)")


def stats_of(
    generations: Sequence[Generation], seconds: float, raster: Raster, repeatable: bool = True
) -> ImageStats:
    """Return the figures of the generations of some images; those of codes leave row ends out."""
    excess = np.zeros((len(generations), raster.tokens))
    codes = set(raster.places.tolist())
    nll_gaps: list[float] = []
    for row, generation in zip(excess, generations, strict=True):
        result = position_excess(generation.steps, generation.label)
        row[: len(result)] = result
        nll_gaps += _surprises(generation, codes)
    reports = tuple(generation.report for generation in generations)
    return ImageStats(
        reports, seconds, raster.grid(excess), repeatable, np.asarray(nll_gaps, dtype=np.float64)
    )


def _surprises(generation: Generation, codes: Container[int]) -> list[float]:
    """Return the NLL gap of each token that was measured and is a code."""
    result, first = [], 0
    for step in generation.steps:
        gaps = enumerate(step.nll_gap, first)
        result += [value for index, value in gaps if index in codes]
        first += len(step.tokens)
    return result


def acceptance_of(generations: Sequence[Generation], raster: Raster) -> NDArray[np.int64]:
    """Return the acceptance map i64 [B, h, w]: how many codes came with each code's forward."""
    lengths = [[len(step.tokens) for step in each.steps] for each in generations]
    maps = np.stack([maps_of(row, (raster.height, raster.line)) for row in lengths])
    return raster.grid(maps)


def codes_of(generations: Sequence[Generation], raster: Raster) -> Tensor:
    """Return the codes i64 [B, h, w]; an image that was cut short repeats its last code."""
    rows: list[list[int]] = []
    for generation in generations:
        known = raster.known(generation.tokens) or [0]
        rows.append(known + [known[-1]] * (raster.codes - len(known)))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, *raster.shape)


def label_for(generations: Sequence[Generation], raster: Raster) -> str:
    """Return the label that holds for all images; "unfinished" where one was cut short."""
    if any(len(each.tokens) < raster.tokens for each in generations):
        return UNFINISHED
    return weakest([each.label for each in generations])


def weakest(labels: Sequence[str]) -> str:
    """Return the weakest of labels."""

    def rank(label: str) -> tuple[int, str]:
        kind = kind_of_label(label)
        return (LABELS.index(kind) if kind in LABELS else len(LABELS), label)

    return max(labels, key=rank)


def maps_of(lengths: Sequence[int], shape: tuple[int, int]) -> NDArray[np.int64]:
    """Return the acceptance map i64 [h, w]: for each code how many came with its forward.

    Args:
        lengths: Codes of each forward, in order.
        shape: Height and width in codes; places without a code hold 0.

    Raises:
        InputError: There are more codes than places.
    """
    together = list(chain.from_iterable([n] * n for n in lengths))
    places = shape[0] * shape[1]
    if len(together) > places:
        raise InputError(f"Expected at most {places} codes for {shape}, got {len(together)}.")
    return np.asarray(together + [0] * (places - len(together)), dtype=np.int64).reshape(shape)
