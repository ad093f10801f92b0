"""Rows of the image benchmark: medians of paired ratios, their intervals, quality, the table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.image_timing import Quality, TimedImages
from harness.image_variants import PLAIN, Variant
from ragspec.pipelines.bench.measure import interval

if TYPE_CHECKING:
    from evaluation.curves import CurvePoint
    from rich.table import Table

NONE = "-"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """The figures of one variant; None stands for figures that were not measured.

    Attributes:
        images: Number of timed images.
        seconds, forwards: Medians over images.
        ratio: Median over images of plain seconds by this variant's.
        ratio_low, ratio_high: 95 % bootstrap interval of `ratio`, of two images or more.
        codes_per_forward: Mean over images.
        tv_excess: Mean over positions of the timed images.
        equal: Share of images that equal the plain ones.
        draft_nodes: Mean nodes of a step.
        frechet, frechet_low, frechet_high: Frechet distance to plain images and its interval.
        frechet_inside: Whether plain decoding is as far from itself.
        quality_tv_excess: `tv_excess` of the images of the Frechet distance.
        nll_gap, nll_gap_error: Mean over codes of the timed images in nats, and standard error.
    """

    variant: str
    rule: str
    drafter: str | None
    settings: dict[str, Any]
    label: str
    images: int
    seconds: float
    forwards: float
    ratio: float
    ratio_low: float | None
    ratio_high: float | None
    codes_per_forward: float | None
    tv_excess: float | None
    equal: float
    draft_nodes: int
    frechet: float | None = None
    frechet_low: float | None = None
    frechet_high: float | None = None
    frechet_inside: bool | None = None
    quality_tv_excess: float | None = None
    nll_gap: float | None = None
    nll_gap_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types."""
        return asdict(self)


def make_rows(timed: Mapping[Variant, TimedImages], quality: Quality | None) -> list[ImageRow]:
    """Return one row for each variant, plain first."""
    plain = next(each for variant, each in timed.items() if variant.name == PLAIN)
    rows = []
    for variant, measured in timed.items():
        pairs = zip(plain.seconds, measured.seconds, strict=True)
        ratios = [ours / max(1e-9, theirs) for ours, theirs in pairs]
        low, high = interval(ratios) if len(ratios) > 1 else (None, None)
        length = float(np.mean(measured.lengths))
        rows.append(
            ImageRow(
                variant=variant.name,
                rule=variant.rule,
                drafter=variant.drafter,
                settings=dict(variant.settings),
                label=measured.label,
                images=len(measured.seconds),
                seconds=float(np.median(measured.seconds)),
                forwards=float(np.median(measured.forwards)),
                ratio=float(np.median(ratios)),
                ratio_low=low,
                ratio_high=high,
                codes_per_forward=None if math.isnan(length) else length,
                tv_excess=mean_of(measured.excess),
                equal=float(np.mean(measured.equal)),
                draft_nodes=measured.usual_size,
                **_quality_of(variant, quality),
                **_nll_gap_of(measured),
            )
        )
    return rows


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; None if a value is missing or there is none."""
    present = [value for value in values if value is not None]
    complete = present and len(present) == len(values)
    return float(np.mean(present)) if complete else None


def _quality_of(variant: Variant, quality: Quality | None) -> dict[str, Any]:
    if quality is None:
        return {}
    distance = quality.null if variant.name == PLAIN else quality.distances[variant.name]
    return {
        "frechet": distance.value,
        "frechet_low": distance.low,
        "frechet_high": distance.high,
        "frechet_inside": distance.value <= quality.null.high,
        "quality_tv_excess": 0.0 if variant.name == PLAIN else quality.excess[variant.name],
    }


def _nll_gap_of(timed: TimedImages) -> dict[str, Any]:
    gaps = np.concatenate([*timed.nll_gaps, np.zeros(0)])
    if not len(gaps):
        return {}
    error = float(np.sqrt((gaps**2).mean() / len(gaps)))
    return {"nll_gap": float(gaps.mean()), "nll_gap_error": error}


COLUMNS = (
    *("variant", ">nodes", ">forwards", ">codes/fwd", ">seconds", ">ratio", ">95 %", ">tv_excess"),
    *(">NLL gap", ">equal", ">Frechet", ">95 %", ">plain?", "label"),
)
"""Headings of the table; `>` marks columns that are aligned to the right."""


def cells(row: ImageRow) -> list[str]:
    """Return the formatted cells of a row, in the order of `COLUMNS`."""
    return [
        row.variant,
        str(row.draft_nodes or NONE),
        f"{row.forwards:.0f}",
        _number(row.codes_per_forward, 2),
        f"{row.seconds:.3f}",
        f"{row.ratio:.2f}",
        NONE if row.ratio_low is None else f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
        _number(row.tv_excess, 4),
        NONE if row.nll_gap is None else f"{row.nll_gap:+.3f} ± {row.nll_gap_error:.3f}",
        f"{row.equal:.0%}",
        _number(row.frechet, 2),
        NONE if row.frechet is None else f"{row.frechet_low:.2f}-{row.frechet_high:.2f}",
        {None: NONE, True: "inside", False: "outside"}[row.frechet_inside],
        row.label,
    ]


def make_table(rows: Sequence[ImageRow], title: str) -> Table:
    """Return the table to print."""
    from rich.table import Table

    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


def curve_points(rows: Sequence[ImageRow], variants: Sequence[Variant]) -> list[CurvePoint]:
    """Return the points of the picture: all variants but plain with a measured distance."""
    from evaluation.curves import CurvePoint

    by_name = {variant.name: variant for variant in variants}
    points = []
    for row in rows:
        if row.variant == PLAIN or row.frechet is None:
            continue
        variant = by_name[row.variant]
        low, high = row.frechet_low or 0.0, row.frechet_high or row.frechet
        points.append(CurvePoint(variant.series, variant.value, row.ratio, row.frechet, low, high))
    order = {point.series: number for number, point in reversed(list(enumerate(points)))}
    return sorted(points, key=lambda p: (order[p.series], _numbers(p.setting)))


def _numbers(setting: str) -> list[float]:
    """Return the numbers of a setting such as "0.3k100g2"."""
    return [float(part) for part in re.split("[kg]", setting) if part]


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
