"""The page of `bench.py image` over continuous latents: figures and outcomes of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from evaluation.couplings import COLOURS, MEANINGS, Grid, grid
from evaluation.line_charts import LineChart, Point, colours_by_name, line_chart
from evaluation.pages import embedded, render_template
from numpy.typing import NDArray

from harness.image_page import quality_scatter
from harness.image_variants import PLAIN, Variant
from harness.latent_table import COLUMNS, cells
from harness.latent_variants import FEWER, build_latent_variant
from ragspec.storage.filesystem import write_output
from ragspec.visual.output import OUTCOMES

if TYPE_CHECKING:
    from harness.image_options import ImageBenchOptions, Prepared
    from harness.image_table import ImageRow
    from harness.image_timing import Quality
    from harness.latent_paths import PathOutput

MAX_IMAGES = 16  # pictures of the charts of acceptance
WIDE, HIGH = 440, 230


@dataclass(frozen=True, slots=True)
class Panel:
    """One variant: its picture, and the grid of the outcomes of its drafts."""

    name: str
    note: str
    picture: str
    grid: Grid


def write_latents(
    options: ImageBenchOptions,
    ready: Prepared,
    rows: Sequence[ImageRow],
    quality: Quality | None,
    out: Path,
) -> None:
    """Draw a few pictures in every variant, in one batch, and write the page of all figures."""
    count = min(options.images, MAX_IMAGES)
    outputs = {variant: _samples(options, ready, variant, count) for variant in ready.variants}
    drafting = {variant.name: each for variant, each in outputs.items() if _judged_mask(each).any()}
    colours = colours_by_name(variant.series for variant in ready.variants if variant.name != PLAIN)
    by_variant = colours_by_name(drafting)
    names = ready.base.family.class_names
    subject = names[0] if names else "class 0"
    values: dict[str, Any] = {
        "summary": f"{options.source}, guidance {options.guidance:g}, {options.images} pictures "
        f"one at a time, budget {options.budget}, seed {options.seed}",
        "quality": quality_scatter(ready.variants, rows, quality, colours),
        "shown_text": f"One picture ({subject}, seed {options.seed}) in every variant",
        "panels": [_panel(variant, each) for variant, each in outputs.items()],
        "meanings": [(MEANINGS[name], css) for name, css in COLOURS.items()],
        "over": f"{count} picture{'s' * (count > 1)} side by side",
        "by_row": _by_row(drafting, by_variant),
        "by_step": _by_step({n: each for n, each in drafting.items() if each.steps}, by_variant),
        "columns": COLUMNS,
        "rows": [cells(row) for row in rows],
        "pictures": True,
    }
    write_output(out, "the page", render_template("latents.html.j2", **values))


def _samples(
    options: ImageBenchOptions, ready: Prepared, variant: Variant, count: int
) -> PathOutput:
    from harness.latent_paths import PathLatents, draw_paths

    base, size = ready.base, options.batch_size
    pipe = build_latent_variant(variant, base, options.budget, size, PathLatents)
    return draw_paths(pipe, **ready.series.arguments(range(count)))


def _judged_mask(out: PathOutput) -> NDArray[np.bool_]:
    """Return a mask bool [B, h, w] of the places where a draft was judged."""
    return _outcomes(out) > 0


def _outcomes(out: PathOutput) -> NDArray[np.int64]:
    assert out.output.stats.outcomes is not None
    return out.output.stats.outcomes


def _panel(variant: Variant, out: PathOutput) -> Panel:
    outcomes, distances = _outcomes(out)[0], out.output.stats.distances
    assert distances is not None
    picture = embedded(out.output.images[0])
    names = [[OUTCOMES[max(0, place)] for place in row] for row in outcomes.tolist()]
    accepted = sum(row.count("accepted") for row in names)
    judged = int((outcomes > 0).sum())
    note = f"{accepted} of {judged} drafts accepted" if judged else "without drafts"
    if variant.rule == FEWER:
        note = f"{variant.settings['steps']} steps, without drafts"
    return Panel(variant.name, note, picture, grid(names, distances[0].tolist()))


def _by_row(outputs: dict[str, PathOutput], colours: dict[str, str]) -> LineChart | None:
    """Return the share of accepted drafts, by the row of the picture."""
    series: dict[str, list[Point]] = {}
    for name, out in outputs.items():
        accepted = (_outcomes(out) == OUTCOMES.index("accepted")).sum((0, 2))
        judged = _judged_mask(out).sum((0, 2))
        series[name] = [
            Point(row + 1, float(accepted[row] / judged[row]), int(judged[row]))
            for row in np.flatnonzero(judged).tolist()
        ]
    if not series:
        return None
    counted = ("rows down", "draft")
    return line_chart(series, colours, width=WIDE, height=HIGH, unit="%", mark=0.0, counted=counted)


def _by_step(outputs: dict[str, PathOutput], colours: dict[str, str]) -> LineChart | None:
    """Return the median of log q / p of drafts, summed from the first judged step.

    Only rules that compare densities have such ratios.
    """
    series: dict[str, list[Point]] = {}
    for name, out in outputs.items():
        ratios = out.ratios[~out.ratios.isnan().all(1)]  # of judged drafts
        steps = int((~ratios.isnan()).any(0).sum())
        if not len(ratios) or not steps:
            continue
        sums = -ratios[:, :steps].flip(1).cumsum(1)  # from x_s on
        medians = torch.median(sums, 0).values.tolist()
        most = ratios.shape[1]
        series[name] = [
            Point(most - steps + place + 1, value, len(ratios))
            for place, value in enumerate(medians)
        ]
    if all(len(points) < 2 for points in series.values()):
        return None
    counted = ("steps from noise", "draft")
    return line_chart(series, colours, width=WIDE, height=HIGH, mark=0.0, counted=counted)
