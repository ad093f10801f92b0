"""Rows of the image benchmark over continuous latents: likeness and distances, not excess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isinf
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.image_table import NONE, ImageRow, make_rows
from harness.image_timing import Quality, Timed
from harness.image_ways import Variant
from harness.latent_ways import FEWER

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class LatentRow(ImageRow):
    """See `ImageRow`. psnr, psnr_least: median and least over images, to the plain picture, in dB.

    None where that picture is the plain one. accepted: drafts that stayed, of those judged.
    distance_mean, distance_most: of kept latents from the target's own, in deviations; None where
    the rule is lossless.
    """

    psnr: float | None = None
    psnr_least: float | None = None
    accepted: float | None = None
    distance_mean: float | None = None
    distance_most: float | None = None


def make_latent_rows(timed: Mapping[Variant, Timed], quality: Quality | None) -> list[ImageRow]:
    """Return one row a way, plain first."""
    names = [field.name for field in fields(ImageRow)]
    return [
        LatentRow(**({name: getattr(row, name) for name in names} | _figures(direction, result)))
        for row, (direction, result) in zip(make_rows(timed, quality), timed.items(), strict=True)
    ]


def _figures(direction: Variant, result: Timed) -> dict[str, Any]:
    outcomes = np.stack([each.outcomes for each in result.figures])
    distances = np.stack([each.distances for each in result.figures])
    judged, known = int((outcomes > 0).sum()), distances[~np.isnan(distances)]
    likeness = [float(np.median(result.psnr)), min(result.psnr)]
    return {
        # Exact for a law of its own, which is not that of plain drawing.
        "label": "approximate" if direction.rule == FEWER else result.label,
        "psnr": None if isinf(likeness[0]) else likeness[0],
        "psnr_least": None if isinf(likeness[1]) else likeness[1],
        "accepted": int((outcomes == 1).sum()) / judged if judged else None,
        "distance_mean": float(known.mean()) if len(known) else None,
        "distance_most": float(known.max()) if len(known) else None,
    }


def cells(row: ImageRow) -> list[str]:
    """Return a row for people, in the order of `COLUMNS`."""
    assert isinstance(row, LatentRow)
    plain = row.psnr is None and row.equal > 0.5
    return [
        row.variant,
        f"{row.forwards:.0f}",
        _number(row.codes_per_forward, 2),
        f"{row.seconds:.3f}",
        f"{row.ratio:.2f}",
        NONE if row.ratio_low is None else f"{row.ratio_low:.2f}-{row.ratio_high:.2f}",
        "same" if plain else _number(row.psnr, 1),
        "same" if row.psnr_least is None else _number(row.psnr_least, 1),
        NONE if row.accepted is None else f"{row.accepted:.0%}",
        _number(row.distance_mean, 4),
        _number(row.distance_most, 4),
        _number(row.frechet, 2),
        NONE if row.frechet is None else f"{row.frechet_low:.2f}-{row.frechet_high:.2f}",
        {None: NONE, True: "inside", False: "outside"}[row.frechet_inside],
        row.label,
    ]


COLUMNS = (
    *("variant", ">forwards", ">latents/fwd", ">seconds", ">ratio", ">95 %", ">PSNR", ">least"),
    *(">kept", ">off, mean", ">most", ">Frechet", ">95 %", "plain?", "label"),
)
"""Headings; those with > stand to the right."""


def make_latent_table(rows: Sequence[ImageRow], title: str) -> Table:
    """Return the table that is printed."""
    from rich.table import Table

    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
