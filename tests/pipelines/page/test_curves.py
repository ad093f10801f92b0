"""Lines along a length: places, marks and names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest

from ragspec.pipelines.page.curves import LINE, TOP, LineChart, Point, colours_by_name, line_chart

SERIES = {
    "auto": [Point(1000, 1.5, 4), Point(7500, 1.1, 2)],
    "rapid": [Point(1000, 0.6, 4)],
    "both": [Point(7500, 1.1, 1)],
}


def chart(series: Mapping[str, Sequence[Point]] = SERIES, **more: float | str) -> LineChart:
    return line_chart(series, colours_by_name(series), width=400, height=200, **more)  # type: ignore[arg-type]


def test_places_follow_the_values_and_stay_inside() -> None:
    made = chart(mark=1.0)
    auto, rapid, both = made.lines
    assert auto.dots[0].x == rapid.dots[0].x < auto.dots[1].x == both.dots[0].x < made.right
    assert auto.dots[0].y < auto.dots[1].y == both.dots[0].y < made.mark < rapid.dots[0].y  # type: ignore[operator]
    assert all(TOP <= dot.y <= made.base for line in made.lines for dot in line.dots)
    assert auto.points == " ".join(f"{dot.x},{dot.y}" for dot in auto.dots)
    assert [dot.few for line in made.lines for dot in line.dots] == [False, True, False, True]
    assert auto.dots[0].tip == "auto, 1,000 tokens: 1.5, 4 prompts"
    assert both.dots[0].tip.endswith("1.1, 1 prompt")
    assert [tick.text for tick in made.ticks] == ["1,000", "7,500"]


def test_names_stand_a_line_apart() -> None:
    made = chart({f"way{n}": [Point(10, 1.0 + n / 1000, 3)] for n in range(6)})
    places = sorted(line.label for line in made.lines)
    assert all(low + LINE <= high + 0.01 for low, high in pairwise(places))
    assert places[-1] <= made.base


@pytest.mark.parametrize(
    ("values", "mark", "unit", "expected"),
    [
        ((0.61, 1.48), 1.0, "×", ["0.6×", "0.8×", "1×", "1.2×", "1.4×", "1.6×"]),
        ((0.02, 0.31), 0.0, "%", ["0%", "10%", "20%", "30%", "40%"]),
        ((1.0, 1.0), 1.0, "", ["1", "1"]),
    ],
)
def test_marks_are_round(
    values: tuple[float, float], mark: float, unit: str, expected: list[str]
) -> None:
    made = chart({"way": [Point(1, values[0], 3), Point(2, values[1], 3)]}, mark=mark, unit=unit)
    assert [row.text for row in made.rows] == expected
    assert [row.at for row in made.rows] == sorted((row.at for row in made.rows), reverse=True)


def test_one_length_stands_in_the_middle() -> None:
    made = chart({"way": [Point(500, 2.0, 3)]})
    assert made.left < made.ticks[0].at < made.right


def test_each_way_has_a_colour() -> None:
    assert colours_by_name(["a", "b", "a"]) == {"a": "s0", "b": "s1"}
