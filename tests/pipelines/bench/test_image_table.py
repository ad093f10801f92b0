"""Rows of the image benchmark: paired medians, missing figures, points of the curve."""

from __future__ import annotations

import io
import json
from collections import Counter
from typing import Any

import pytest
from rich.console import Console

from ragspec.pipelines.bench.image_table import curve_points, make_rows, make_table, mean_of
from ragspec.pipelines.bench.image_timing import Quality, Timed
from ragspec.pipelines.bench.image_ways import parse_ways
from ragspec.visual.evaluation.frechet import Interval

WAYS = parse_ways(["exact", "lantern@0.1", "lantern@0.05", "draft-only"])


def timed(seconds: list[float], excess: Any = 0.0, length: float = 2.0) -> Timed:
    n = len(seconds)
    return Timed(
        "exact", seconds, [9] * n, [length] * n, [excess] * n, [True] * n, Counter({4: 10})
    )


def measured() -> dict[Any, Timed]:
    plain, fast, loose, tight, draft = WAYS
    return {
        plain: timed([2.0, 4.0, 6.0], length=1.0),
        fast: timed([1.0, 1.0, 6.0]),
        loose: timed([1.0, 1.0, 1.0], 0.2),
        tight: timed([1.0, 2.0, 3.0], 0.1),
        draft: timed([0.5] * 3, None, float("nan")),
    }


QUALITY = Quality(
    Interval(1.0, 0.5, 2.0),
    [1.0] * 5,
    {
        "exact": Interval(1.2, 0.8, 1.6),
        "lantern@0.1": Interval(9.0, 8.0, 10.0),
        "lantern@0.05": Interval(1.9, 1.5, 2.5),
        "draft-only": Interval(50.0, 40.0, 60.0),
    },
    {"exact": 0.0, "lantern@0.1": 0.21, "lantern@0.05": 0.11, "draft-only": None},
    500,
)


def test_ratios_are_medians_of_pairs() -> None:
    rows = {row.way: row for row in make_rows(measured(), None)}
    assert rows["plain"].ratio == 1.0
    assert rows["exact"].ratio == 2.0  # of 2, 4 and 1
    assert rows["exact"].ratio_low == 1.0 and rows["exact"].ratio_high == 4.0
    assert rows["exact"].frechet is None and rows["exact"].frechet_inside is None
    assert rows["draft-only"].codes_per_forward is None and rows["draft-only"].tv_excess is None
    assert json.dumps([row.to_dict() for row in rows.values()])


def test_quality_says_what_lies_inside() -> None:
    rows = {row.way: row for row in make_rows(measured(), QUALITY)}
    inside = {name: row.frechet_inside for name, row in rows.items()}
    assert inside == {
        "plain": True,
        "exact": True,
        "lantern@0.1": False,
        "lantern@0.05": True,
        "draft-only": False,
    }
    assert rows["lantern@0.1"].quality_tv_excess == 0.21
    assert rows["plain"].frechet == 1.0


def test_the_table_prints_every_row() -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    console.print(make_table(make_rows(measured(), QUALITY), "title"))
    text = out.getvalue()
    assert all(way.name in text for way in WAYS)
    assert "outside" in text and "inside" in text and "nan" not in text


def test_one_image_has_no_interval() -> None:
    rows = make_rows({WAYS[0]: timed([2.0]), WAYS[1]: timed([1.0])}, None)
    assert [(row.ratio, row.ratio_low, row.ratio_high) for row in rows][1] == (2.0, None, None)
    cells = list(make_table(rows, "title").columns[6].cells)
    assert cells == ["-", "-"]


def test_points_of_a_series_follow_their_value() -> None:
    points = curve_points(make_rows(measured(), QUALITY), WAYS)
    assert [(p.series, p.setting) for p in points] == [
        ("exact", ""),
        ("lantern", "0.05"),
        ("lantern", "0.1"),
        ("draft-only", ""),
    ]
    assert curve_points(make_rows(measured(), None), WAYS) == []


def test_a_mean_needs_all_its_values() -> None:
    assert mean_of([1.0, 3.0]) == pytest.approx(2.0)
    assert mean_of([1.0, None]) is None and mean_of([]) is None
