"""Statistics of generated images: forwards, seconds, acceptance maps and excess variation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.reports.generation import Generation
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
UNFINISHED = "unfinished"  # the label of images if one was interrupted


@dataclass(frozen=True, slots=True)
class ImageStats:
    """Statistics of one call; B images of h * w codes.

    Attributes:
        reports: One for each image.
        seconds: Wall time of the codes, without decoding the images.
        excess f64 [B, h, w]: The total variation that a relaxed rule may have added at each code;
            0 under exact rules, NaN under rules that do not measure it.
        repeatable: Whether the same seeds give the same images again. They may not under an inexact
            rule with a budget that depends on time, as the drafts differ.
        nll_gaps f64 [n]: Of each measured code, see `nll_gap`.
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
        """Forward passes of the target over all images, prefill included.

        A pass over several images counts for each of them.
        """
        return sum(report.forward_passes for report in self.reports)

    @property
    def codes_per_forward(self) -> float:
        """Codes per forward pass, prefill excluded."""
        passes = sum(report.forwards for report in self.reports)
        return sum(report.tokens - 1 for report in self.reports) / max(1, passes)

    @property
    def tv_excess(self) -> float | None:
        """The mean excess per position; None if the rule does not measure it."""
        mean = float(self.excess.mean()) if self.excess.size else 0.0
        return None if np.isnan(mean) else mean

    @property
    def nll_gap(self) -> float | None:
        """The mean of -log p(code) - H(p) over all codes, in nats; about 0 without relaxation.

        None if it was not measured; see `nll_gap_of` in `ragspec.visual.rules.tv_budget`.
        """
        return float(self.nll_gaps.mean()) if self.nll_gaps.size else None

    @property
    def nll_gap_error(self) -> float | None:
        """One standard error of `nll_gap`."""
        size = self.nll_gaps.size
        return float(np.sqrt((self.nll_gaps**2).mean() / size)) if size else None

    def summary(self) -> str:
        """Return a summary of one line."""
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
    """Return the statistics of some images; figures per code leave the ends of rows out."""
    excess = np.zeros((len(generations), raster.tokens))
    codes = set(raster.places.tolist())
    nll_gaps: list[float] = []
    for row, generation in zip(excess, generations, strict=True):
        values = position_excess(generation.steps, generation.label)
        row[: len(values)] = values
        first = 0
        for step in generation.steps:
            nll_gaps += [gap for index, gap in enumerate(step.nll_gap, first) if index in codes]
            first += len(step.tokens)
    reports = tuple(generation.report for generation in generations)
    return ImageStats(
        reports, seconds, raster.grid(excess), repeatable, np.asarray(nll_gaps, dtype=np.float64)
    )


def acceptance_of(generations: Sequence[Generation], raster: Raster) -> NDArray[np.int64]:
    """Return the acceptance map i64 [B, h, w]: for each code, the size of its forward's output.

    Missing codes hold 0.
    """
    maps = np.zeros((len(generations), raster.tokens), dtype=np.int64)
    for row, generation in zip(maps, generations, strict=True):
        lengths = np.array([len(step.tokens) for step in generation.steps], dtype=np.int64)
        row[: lengths.sum()] = lengths.repeat(lengths)
    return raster.grid(maps)


def codes_of(generations: Sequence[Generation], raster: Raster) -> Tensor:
    """Return the codes i64 [B, h, w]; an image that ended early repeats its last code."""
    rows: list[list[int]] = []
    for generation in generations:
        codes = raster.known(generation.tokens) or [0]
        rows.append(codes + [codes[-1]] * (raster.codes - len(codes)))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, *raster.shape)


def label_for(generations: Sequence[Generation], raster: Raster) -> str:
    """Return the label that holds for all images; "unfinished" if one ended early."""
    if any(len(each.tokens) < raster.tokens for each in generations):
        return UNFINISHED
    return weakest([each.label for each in generations])


def weakest(labels: Sequence[str]) -> str:
    """Return the label with the weakest guarantee."""

    def rank(label: str) -> tuple[int, str]:
        kind = kind_of_label(label)
        return (LABELS.index(kind) if kind in LABELS else len(LABELS), label)

    return max(labels, key=rank)
