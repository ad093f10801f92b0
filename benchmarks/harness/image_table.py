"""Rows of the image benchmark: medians of paired ratios, their intervals, quality, the table."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.image_timing import Quality, Timed
from harness.image_ways import PLAIN, Variant
from ragspec.pipelines.bench.measure import interval

if TYPE_CHECKING:
    from evaluation.curves import CurvePoint
    from rich.table import Table

NONE = "-"


@dataclass(frozen=True, slots=True)
class ImageRow:
    """One way of drawing.

    images: timed ones. seconds, forwards: medians an image. ratio: median of plain seconds / this
    way's, paired by image; ratio_low, ratio_high: its 95 % bootstrap interval, of two images or
    more. codes_per_forward: mean over images. tv_excess: mean a position, of the timed images;
    quality_tv_excess: of those that the Frechet distance is of. surprise: mean a code of the timed
    images, in nats, and surprise_error, one standard error of it. equal: share of images that are
    the plain ones. frechet: with its interval; frechet_inside: whether plain decoding is as far
    from itself. draft_nodes: mean a step. What was not measured is None.
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


def make_rows(timed: Mapping[Variant, Timed], quality: Quality | None) -> list[ImageRow]:
    """Return one row a way, plain first."""
    plain = next(match for variant, match in timed.items() if variant.name == PLAIN)
    rows = []
    for direction, result in timed.items():
        pairs = zip(plain.seconds, result.seconds, strict=True)
        ratios = [ours / max(1e-9, theirs) for ours, theirs in pairs]
        low, high = interval(ratios) if len(ratios) > 1 else (None, None)
        length = float(np.mean(result.lengths))
        rows.append(
            ImageRow(
                variant=direction.name,
                rule=direction.rule,
                drafter=direction.drafter,
                settings=dict(direction.settings),
                label=result.label,
                images=len(result.seconds),
                seconds=float(np.median(result.seconds)),
                forwards=float(np.median(result.forwards)),
                ratio=float(np.median(ratios)),
                ratio_low=low,
                ratio_high=high,
                codes_per_forward=None if math.isnan(length) else length,
                tv_excess=mean_of(result.excess),
                equal=float(np.mean(result.equal)),
                draft_nodes=result.usual_size,
                **_quality_of(direction, quality),
                **_nll_gap_of(result),
            )
        )
    return rows


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean; None where a value is missing."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known and len(known) == len(values) else None


def _quality_of(direction: Variant, quality: Quality | None) -> dict[str, Any]:
    if quality is None:
        return {}
    result = quality.null if direction.name == PLAIN else quality.distances[direction.name]
    return {
        "frechet": result.value,
        "frechet_low": result.low,
        "frechet_high": result.high,
        "frechet_inside": result.value <= quality.null.high,
        "quality_tv_excess": 0.0 if direction.name == PLAIN else quality.excess[direction.name],
    }


def _nll_gap_of(result: Timed) -> dict[str, Any]:
    every = np.concatenate([*result.nll_gaps, np.zeros(0)])
    if not len(every):
        return {}
    error = float(np.sqrt((every**2).mean() / len(every)))
    return {"nll_gap": float(every.mean()), "nll_gap_error": error}


COLUMNS = (
    *("variant", ">nodes", ">forwards", ">codes/fwd", ">seconds", ">ratio", ">95 %", ">tv_excess"),
    *(">surprise", ">equal", ">Frechet", ">95 %", ">plain?", "label"),
)
"""Headings; those with > stand to the right."""


def cells(row: ImageRow) -> list[str]:
    """Return a row for people, in the order of `COLUMNS`."""
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
    """Return the table that is printed."""
    from rich.table import Table

    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


def curve_points(rows: Sequence[ImageRow], ways: Sequence[Variant]) -> list[CurvePoint]:
    """Return the points of the picture: all ways but plain whose distance was measured."""
    from evaluation.curves import CurvePoint

    by_name = {variant.name: variant for variant in ways}
    results = []
    for row in rows:
        if row.variant == PLAIN or row.frechet is None:
            continue
        direction = by_name[row.variant]
        low, high = row.frechet_low or 0.0, row.frechet_high or row.frechet
        results.append(
            CurvePoint(direction.series, direction.value, row.ratio, row.frechet, low, high)
        )
    order = {point.series: number for number, point in reversed(list(enumerate(results)))}
    return sorted(results, key=lambda p: (order[p.series], _numbers(p.setting)))


def _numbers(setting: str) -> list[float]:
    """Return the numbers of a setting such as "0.3k100g2"."""
    return [float(part) for part in re.split("[kg]", setting) if part]


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
