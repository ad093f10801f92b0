"""The page of `bench.py image` over codes: figures, and one picture in every variant."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from evaluation.line_charts import colours_by_name
from evaluation.pages import embedded, render_template
from evaluation.pictures import heat_map
from evaluation.scatter import QualityPoint, Scatter, scatter

from harness.image_table import COLUMNS, cells
from harness.image_variants import DRAFT_ONLY, PLAIN, Variant
from ragspec.storage.filesystem import write_output

if TYPE_CHECKING:
    from harness.image_options import ImageBenchOptions, Prepared
    from harness.image_table import ImageRow
    from harness.image_timing import Quality

_SIDE = 128  # pixels of a map


def write_images(
    options: ImageBenchOptions,
    ready: Prepared,
    rows: Sequence[ImageRow],
    quality: Quality | None,
    out: Path,
) -> None:
    """Draw one picture in every variant and write the page of all figures."""
    names = ready.base.family.class_names
    first = ready.series.subjects[0]
    subject = names[first] if names and ready.series.by_class else first
    colours = colours_by_name(variant.series for variant in ready.variants if variant.name != PLAIN)
    values: dict[str, Any] = {
        "summary": f"{options.source}, guidance {options.guidance:g}, {options.images} pictures "
        f"one at a time, budget {options.budget}, seed {options.seed}",
        "quality": quality_scatter(ready.variants, rows, quality, colours),
        "shown_text": f"One picture ({subject}, seed {options.seed}) in every variant",
        "panels": [_panel(options, ready, variant) for variant in ready.variants],
        "columns": COLUMNS,
        "rows": [cells(row) for row in rows],
        "pictures": True,
    }
    write_output(out, "the page", render_template("images.html.j2", **values))


def _panel(options: ImageBenchOptions, ready: Prepared, variant: Variant) -> dict[str, Any]:
    """Return the picture of a variant, and a map of the codes that each forward gave."""
    out = ready.build(variant, options.budget, 1)(**ready.series.arguments([0]))
    has_target = variant.name != DRAFT_ONLY
    note = "without the target"
    if has_target:
        note = f"{out.stats.codes_per_forward:.2f} codes a forward"
    return {
        "name": variant.name,
        "note": f"{note}, {out.label if has_target else 'approximate'}",
        "picture": embedded(out.images[0]),
        "map": embedded(heat_map(out.images[0], out.acceptance_map[0], side=_SIDE)),
    }


def quality_scatter(
    variants: Sequence[Variant],
    rows: Sequence[ImageRow],
    quality: Quality | None,
    colours: dict[str, str],
) -> Scatter | None:
    """Return a chart of Frechet distance by speedup; None if no distance was measured."""
    if quality is None:
        return None
    series = {variant.name: variant.series for variant in variants}
    points = [
        QualityPoint(
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
