"""The page of `bench.py long`: speedup, cost and acceptance of each variant by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from evaluation.line_charts import FEW, LineChart, colours_by_name, line_chart
from evaluation.pages import render_template

from harness.long_table import COLUMNS, LongRow, series, tables
from ragspec.storage.filesystem import write_output

WIDE, HIGH = 920, 300
SMALL_WIDE, SMALL_HIGH = 440, 210
COST = "c: time of a draft level by that of a plain step"
SHARE = "share of drafted tokens that are accepted"


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of task: the large chart, and the small ones with their titles."""

    title: str
    hint: str
    speed: LineChart
    small: list[tuple[str, LineChart]]


def write_lengths(rows: Sequence[LongRow], summary: str, out: Path) -> None:
    """Write the page of all rows; raises InputError if the file cannot be written."""
    colours = colours_by_name(row.variant for row in rows)
    kinds = dict.fromkeys(row.kind for row in rows)
    parts = [_part(kind, [r for r in rows if r.kind == kind], colours) for kind in kinds]
    values = {"parts": [part for part in parts if part], "columns": COLUMNS}
    every = list(tables(rows))
    page = render_template("lengths.html.j2", summary=summary, tables=every, **values)
    write_output(out, "the page", page)


def _part(kind: str, rows: Sequence[LongRow], colours: dict[str, str]) -> Part | None:
    """Return the charts of a kind; None if no prompt could be timed."""

    def chart(
        figure: Callable[[LongRow], float | None], small: bool, unit: str, mark: float | None
    ) -> LineChart | None:
        lines = dict(series(rows, figure))
        width, height = (SMALL_WIDE, SMALL_HIGH) if small else (WIDE, HIGH)
        if not lines:
            return None
        return line_chart(lines, colours, width=width, height=height, unit=unit, mark=mark)

    speed = chart(lambda row: row.ratio, False, "×", 1.0)
    if speed is None:
        return None
    small = [
        (COST, chart(lambda row: row.c, True, "", 0.0)),
        (SHARE, chart(lambda row: row.accepted, True, "%", 0.0)),
    ]
    timed = sum(row.timed for row in rows if row.variant == rows[0].variant)
    prompts = sum(row.prompts for row in rows if row.variant == rows[0].variant)
    others = "; the others loop or are too short to time" if timed < prompts else ""
    hint = f"{timed} of {prompts} prompts{others}. Hollow points have fewer than {FEW} prompts."
    return Part(kind, hint, speed, [(title, each) for title, each in small if each])
