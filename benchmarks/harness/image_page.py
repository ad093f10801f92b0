"""The page of `ragspec bench image` over codes: figures, and one picture in every way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.line_charts import colours_by_name
from evaluation.pages import embedded, render_template
from evaluation.pictures import heat_map
from evaluation.scatter import Measured, Scatter, scatter

from harness.image_table import COLUMNS, cells
from harness.image_ways import DRAFT_ONLY, PLAIN, Variant
from ragspec.pipelines.page.page import save

if TYPE_CHECKING:
    from harness.image_asked import ImageBench, Prepared
    from harness.image_table import ImageRow
    from harness.image_timing import Quality

_SIDE = 128  # pixels of a map


def write_images(
    request: ImageBench,
    ready: Prepared,
    rows: Sequence[ImageRow],
    quality: Quality | None,
    out: Path,
) -> None:
    """Draw one picture in every way again and write the page of all figures."""
    names = ready.base.class_names
    first = ready.image_config.subjects[0]
    subject = names[first] if names and ready.image_config.by_class else first
    colours = colours_by_name(
        direction.series for direction in ready.ways if direction.name != PLAIN
    )
    values: dict[str, Any] = {
        "summary": f"{request.source}, guidance {request.guidance:g}, {request.images} pictures "
        f"one at a time, budget {request.budget}, seed {request.seed}",
        "quality": quality_scatter(ready.ways, rows, quality, colours),
        "shown_text": f"One picture ({subject}, seed {request.seed}) in every way",
        "panels": [_panel(request, ready, direction) for direction in ready.ways],
        "columns": COLUMNS,
        "rows": [cells(row) for row in rows],
        "pictures": True,
    }
    save(render_template("images.html.j2", **values), out)


def _panel(request: ImageBench, ready: Prepared, direction: Variant) -> dict[str, Any]:
    """Return one way's picture, beside it how many codes came together."""
    out = ready.build(direction, request.budget, 1)(**ready.image_config.arguments([0]))
    current = direction.name != DRAFT_ONLY  # the target does nothing there
    note = f"{out.stats.codes_per_forward:.2f} codes a forward" if current else "without the target"
    return {
        "name": direction.name,
        "note": f"{note}, {out.label if current else 'approximate'}",
        "picture": embedded(out.images[0]),
        "map": embedded(heat_map(out.images[0], out.acceptance_map[0], side=_SIDE)),
    }


def quality_scatter(
    ways: Sequence[Variant],
    rows: Sequence[ImageRow],
    quality: Quality | None,
    colours: dict[str, str],
) -> Scatter | None:
    """Return Frechet distances by times as fast; None where none was measured."""
    if quality is None:
        return None
    series = {direction.name: direction.series for direction in ways}
    points = [
        Measured(
            row.variant,
            series[row.variant],
            row.ratio,
            row.frechet,
            row.frechet_low or 0.0,
            row.frechet_high or row.frechet,
        )
        for row in rows
        if row.variant != PLAIN and row.frechet is not None
    ]
    return scatter(points, colours, (quality.null.low, quality.null.high)) if points else None
