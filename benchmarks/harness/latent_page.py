"""The page of `ragspec bench image` over continuous latents: figures, and what became of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from evaluation.couplings import COLOURS, MEANINGS, Grid, grid
from evaluation.line_charts import LineChart, Point, colours_by_name, line_chart
from evaluation.pages import embedded, render_template
from numpy.typing import NDArray

from harness.image_page import quality_scatter
from harness.image_ways import PLAIN, Variant
from harness.latent_table import COLUMNS, cells
from harness.latent_ways import FEWER, build_latent_variant
from ragspec.pipelines.page.page import save
from ragspec.visual.latents.judged import OUTCOMES
from ragspec.visual.pipeline.stats import LatentStats

if TYPE_CHECKING:
    from harness.image_asked import ImageBench, Prepared
    from harness.image_table import ImageRow
    from harness.image_timing import Quality
    from harness.latent_paths import PathOutput
    from ragspec.visual.pipeline.latents import LatentPipeline

MOST = 16  # pictures that acceptance is told of
WIDE, HIGH = 440, 230


@dataclass(frozen=True, slots=True)
class Panel:
    """One way: its picture, and the grid of what became of the drafts."""

    name: str
    note: str
    picture: str
    grid: Grid


def write_latents(
    request: ImageBench,
    ready: Prepared,
    rows: Sequence[ImageRow],
    quality: Quality | None,
    out: Path,
) -> None:
    """Draw a few pictures in every way again, side by side, and write the page of all figures."""
    count = min(request.images, MOST)
    sample = {direction: _samples(request, ready, direction, count) for direction in ready.ways}
    drafting = {direction.name: each for direction, each in sample.items() if _judged(each).any()}
    colours = colours_by_name(
        direction.series for direction in ready.ways if direction.name != PLAIN
    )
    by_variant = colours_by_name(drafting)
    names = ready.base.class_names
    subject = names[0] if names else "class 0"
    values: dict[str, Any] = {
        "summary": f"{request.source}, guidance {request.guidance:g}, {request.images} pictures "
        f"one at a time, budget {request.budget}, seed {request.seed}",
        "quality": quality_scatter(ready.ways, rows, quality, colours),
        "shown_text": f"One picture ({subject}, seed {request.seed}) in every way",
        "panels": [_panel(direction, each) for direction, each in sample.items()],
        "meanings": [(MEANINGS[name], css) for name, css in COLOURS.items()],
        "over": f"{count} picture{'s' * (count > 1)} side by side",
        "by_row": _by_row(drafting, by_variant),
        "by_step": _by_step({n: each for n, each in drafting.items() if each.steps}, by_variant),
        "columns": COLUMNS,
        "rows": [cells(row) for row in rows],
        "pictures": True,
    }
    save(render_template("latents.html.j2", **values), out)


def _samples(request: ImageBench, ready: Prepared, direction: Variant, count: int) -> PathOutput:
    from harness.latent_paths import PathPipeline

    base = cast("LatentPipeline", ready.base)
    pipe = build_latent_variant(direction, base, request.budget, request.side_by_side, PathPipeline)
    out: PathOutput = pipe(**ready.image_config.arguments(range(count)))
    return out


def _judged(out: PathOutput) -> NDArray[np.bool_]:
    """Return at which places a draft was judged: bool [B, h, w]."""
    result: NDArray[np.bool_] = _stats(out).outcomes > 0
    return result


def _stats(out: PathOutput) -> LatentStats:
    assert isinstance(out.stats, LatentStats)
    return out.stats


def _panel(direction: Variant, out: PathOutput) -> Panel:
    stats = _stats(out)
    picture = embedded(out.images[0])
    names = [[OUTCOMES[max(0, place)] for place in row] for row in stats.outcomes[0].tolist()]
    selected = sum(row.count("accepted") for row in names)
    judged = int((stats.outcomes[0] > 0).sum())
    note = f"{selected} of {judged} drafts kept" if judged else "without drafts"
    if direction.rule == FEWER:
        note = f"{direction.settings['steps']} steps, without drafts"
    return Panel(direction.name, note, picture, grid(names, stats.distances[0].tolist()))


def _by_row(sample: dict[str, PathOutput], colours: dict[str, str]) -> LineChart | None:
    """Return the share of drafts that were kept, by the row of the picture."""
    series: dict[str, list[Point]] = {}
    for name, out in sample.items():
        selected = (_stats(out).outcomes == OUTCOMES.index("accepted")).sum((0, 2))
        judged = _judged(out).sum((0, 2))
        series[name] = [
            Point(row + 1, float(selected[row] / judged[row]), int(judged[row]))
            for row in np.flatnonzero(judged).tolist()
        ]
    if not series:
        return None
    counted = ("rows down", "draft")
    return line_chart(series, colours, width=WIDE, height=HIGH, unit="%", mark=0.0, counted=counted)


def _by_step(sample: dict[str, PathOutput], colours: dict[str, str]) -> LineChart | None:
    """Return the median of log q / p of drafts, summed from the first step that is judged on.

    Of rules that compare densities alone.
    """
    series: dict[str, list[Point]] = {}
    for name, out in sample.items():
        assert out.ratios is not None
        known = out.ratios[~out.ratios.isnan().all(1)]  # of drafts that were judged
        steps = int((~known.isnan()).any(0).sum())
        if not len(known) or not steps:
            continue
        sums = -known[:, :steps].flip(1).cumsum(1)  # from x_s on
        medians = torch.median(sums, 0).values.tolist()
        most = known.shape[1]
        series[name] = [
            Point(most - steps + place + 1, value, len(known))
            for place, value in enumerate(medians)
        ]
    if all(len(points) < 2 for points in series.values()):
        return None
    counted = ("steps from noise", "draft")
    return line_chart(series, colours, width=WIDE, height=HIGH, mark=0.0, counted=counted)
