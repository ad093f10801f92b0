"""The page of `ragspec bench long`: speed, cost and acceptance of each way along the length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.line_charts import FEW, LineChart, colours_by_name, line_chart
from evaluation.pages import render_template

from harness.long_table import COLUMNS, LongRow, series, tables
from ragspec.pipelines.page.page import save

WIDE, HIGH = 920, 300
SMALL_WIDE, SMALL_HIGH = 440, 210
COST = "c: a level of a draft against a plain step"
SHARE = "accepted of what was drafted"


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of task: the large chart, and the small ones with their titles."""

    title: str
    hint: str
    speed: LineChart
    small: list[tuple[str, LineChart]]


def write_lengths(rows: Sequence[LongRow], message: str, out: Path) -> None:
    """Write the page of all rows; raises InputError where it cannot be written."""
    colours = colours_by_name(row.variant for row in rows)
    kinds = dict.fromkeys(row.kind for row in rows)
    parts = [_part(kind, [r for r in rows if r.kind == kind], colours) for kind in kinds]
    values = {"parts": [part for part in parts if part], "columns": COLUMNS}
    save(
        render_template("lengths.html.j2", summary=message, tables=list(tables(rows)), **values),
        out,
    )


def _part(kind: str, rows: Sequence[LongRow], colours: dict[str, str]) -> Part | None:
    """Return the charts of a kind; None where nothing could be timed."""

    def chart(
        figure: Callable[[LongRow], float | None], small: bool, unit: str, mark: float | None
    ) -> LineChart | None:
        record = dict(series(rows, figure))
        width, height = (SMALL_WIDE, SMALL_HIGH) if small else (WIDE, HIGH)
        if not record:
            return None
        return line_chart(record, colours, width=width, height=height, unit=unit, mark=mark)

    speed = chart(lambda row: row.ratio, False, "×", 1.0)
    if speed is None:
        return None
    small = [
        (COST, chart(lambda row: row.c, True, "", 0.0)),
        (SHARE, chart(lambda row: row.accepted, True, "%", 0.0)),
    ]
    selected = sum(row.timed for row in rows if row.variant == rows[0].variant)
    prompts = sum(row.prompts for row in rows if row.variant == rows[0].variant)
    others = "; the others loop, or end before they can be timed" if selected < prompts else ""
    hint = f"{selected} of {prompts} prompts{others}. Hollow points rest on fewer than {FEW}."
    return Part(kind, hint, speed, [(title, each) for title, each in small if each])
