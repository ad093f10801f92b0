"""Rows of the image benchmark over continuous latents: PSNR and distances, not excess."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isinf
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.image_table import NONE, ImageRow, make_rows
from harness.image_timing import Quality, TimedImages
from harness.image_variants import Variant
from harness.latent_variants import FEWER

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True)
class LatentRow(ImageRow):
    """An `ImageRow` of a model of continuous latents.

    Attributes:
        psnr, psnr_least: Median and least dB to the plain picture; None if they are equal.
        accepted: Share of judged drafts that were accepted.
        distance_mean, distance_most: Distance of accepted latents from the target's in standard
            deviations; None for a lossless rule.
    """

    psnr: float | None = None
    psnr_least: float | None = None
    accepted: float | None = None
    distance_mean: float | None = None
    distance_most: float | None = None


def make_latent_rows(
    timed: Mapping[Variant, TimedImages], quality: Quality | None
) -> list[ImageRow]:
    """Return one row for each variant, plain first."""
    names = [field.name for field in fields(ImageRow)]
    return [
        LatentRow(
            **({name: getattr(row, name) for name in names} | _figures(variant, timed_images))
        )
        for row, (variant, timed_images) in zip(
            make_rows(timed, quality), timed.items(), strict=True
        )
    ]


def _figures(variant: Variant, timed_images: TimedImages) -> dict[str, Any]:
    outcomes = np.stack([each.outcomes for each in timed_images.figures])
    distances = np.stack([each.distances for each in timed_images.figures])
    judged, measured = int((outcomes > 0).sum()), distances[~np.isnan(distances)]
    likeness = [float(np.median(timed_images.psnr)), min(timed_images.psnr)]
    return {
        # Its distribution is not that of plain drawing.
        "label": "approximate" if variant.rule == FEWER else timed_images.label,
        "psnr": None if isinf(likeness[0]) else likeness[0],
        "psnr_least": None if isinf(likeness[1]) else likeness[1],
        "accepted": int((outcomes == 1).sum()) / judged if judged else None,
        "distance_mean": float(measured.mean()) if len(measured) else None,
        "distance_most": float(measured.max()) if len(measured) else None,
    }


def cells(row: ImageRow) -> list[str]:
    """Return the formatted cells of a row, in the order of `COLUMNS`."""
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
    *(">accepted", ">distance", ">most", ">Frechet", ">95 %", "plain?", "label"),
)
"""Headings of the table; `>` marks columns that are aligned to the right."""


def make_latent_table(rows: Sequence[ImageRow], title: str) -> Table:
    """Return the table to print."""
    from rich.table import Table

    table = Table(title=title)
    for name in COLUMNS:
        table.add_column(name.lstrip(">"), justify="right" if name.startswith(">") else "left")
    for row in rows:
        table.add_row(*cells(row))
    return table


def _number(value: float | None, digits: int) -> str:
    return NONE if value is None else f"{value:.{digits}f}"
