"""The picture of quality against speed: where values stand, and that it is drawn."""

from __future__ import annotations

import math
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from ragspec.errors import InputError
from ragspec.visual.evaluation import curves
from ragspec.visual.evaluation.curves import Axes, CurvePoint, quality_curve
from ragspec.visual.evaluation.lettering import font

POINTS = [
    CurvePoint("walk", "", 1.4, 1.5, 1.0, 2.0),
    CurvePoint("lantern", "0.05", 1.6, 4.0, 3.0, 5.0),
    CurvePoint("lantern", "0.1", 1.9, 9.0, 7.0, 12.0),
]
POINT = "(a point)"


def test_faster_is_further_right_and_nearer_is_lower() -> None:
    axes = Axes((1.0, 2.0), (1.0, 100.0))
    assert axes.x(1.0) == curves.LEFT and axes.x(2.0) == curves.WIDTH - curves.RIGHT
    assert axes.y(1.0) == curves.HEIGHT - curves.BOTTOM
    assert math.isclose(axes.y(10.0), (axes.y(1.0) + axes.y(100.0)) / 2)  # logarithmic
    assert axes.y(0.0) == axes.y(1.0) and axes.y(1e9) == curves.TOP


def test_the_axes_hold_every_point_the_band_and_plain_speed() -> None:
    axes = curves._axes(POINTS, (0.8, 2.5))
    assert axes.speeds[0] < 1.0 and axes.speeds[1] > 1.9
    assert axes.distances[0] < 0.8 and axes.distances[1] > 12.0


def test_the_curve_is_drawn_in_the_colours_of_its_series() -> None:
    made = quality_curve(POINTS, (0.8, 2.5), title="Q", note="n")
    assert made.size == (curves.WIDTH, curves.HEIGHT)
    pixels = np.asarray(made).reshape(-1, 3)
    for colour in curves.COLOURS[:2]:
        assert (pixels == np.array(colour)).all(-1).sum() > 8
    assert not (pixels == np.array(curves.COLOURS[2])).all(-1).any()


def test_points_without_numbers_are_left_out_and_none_is_refused() -> None:
    lost = CurvePoint("gsd", "", math.nan, 1.0, 1.0, 1.0)
    assert quality_curve([*POINTS, lost], (0.8, 2.5)).size
    with pytest.raises(InputError, match="no point"):
        quality_curve([lost], (0.8, 2.5))


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, curves.Box]]:
    """Return a list that fills with what is drawn: texts and discs in turn, with their box."""
    found: list[tuple[str, curves.Box]] = []
    write, dot = curves._text, curves._disc

    def text(draw: Any, at: Any, said: str, size: int, colour: Any, anchor: str = "la") -> None:
        left, top, right, bottom = font(size).getbbox(said, anchor=anchor)
        found.append((said, (at[0] + left, at[1] + top, at[0] + right, at[1] + bottom)))
        write(draw, at, said, size, colour, anchor)

    def disc(draw: Any, x: float, y: float, radius: float, colour: Any) -> None:
        found.append((POINT, (x - radius, y - radius, x + radius, y + radius)))
        dot(draw, x, y, radius, colour)

    monkeypatch.setattr(curves, "_text", text)
    monkeypatch.setattr(curves, "_disc", disc)
    return found


@pytest.mark.parametrize("setting", ["", "0.4", "0.99k200g2"])
@pytest.mark.parametrize("speed", [1.0, 1.4, 3.0])
@pytest.mark.parametrize("distance", [1.0, 9.0, 80.0])
def test_labels_lie_neither_on_each_other_nor_on_points(
    monkeypatch: pytest.MonkeyPatch, speed: float, distance: float, setting: str
) -> None:
    """Eight series end at about one place, in every part of the picture."""
    ends = [CurvePoint("end", "", s, d, d, d) for s, d in ((1.0, 1.0), (3.0, 80.0))]
    crowd = [
        CurvePoint(f"lantern++ {n}", setting, speed + 0.002 * n, distance, distance, distance)
        for n in range(8)
    ]
    found = recorded(monkeypatch)
    quality_curve([*ends, *crowd], (0.8, 2.5))
    points = [box for text, box in found if text == POINT]
    said = {point.series for point in crowd} | {"end", setting, "plain against plain"}
    placed = [box for text, box in found if text in said - {""}]
    assert (len(points), len(placed)) == (10, 18 if setting else 10)
    assert all(left > 0 and right < curves.WIDTH for left, _, right, _ in placed)
    assert all(top > 0 and bottom < curves.HEIGHT for _, top, _, bottom in placed)
    assert not any(curves._meet(*pair) for pair in combinations(placed, 2))
    assert not any(curves._meet(box, point) for box in placed for point in points)


def test_no_point_is_drawn_over_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    found = recorded(monkeypatch)
    quality_curve(POINTS, (0.8, 2.5))
    order = [text for text, _ in found]
    first = min(order.index(text) for text in ("walk", "lantern", "0.05", "0.1"))
    assert POINT not in order[first:] and order.count(POINT) == len(POINTS)


def test_boxes_meet_where_they_share_a_place() -> None:
    assert curves._meet((0, 0, 10, 10), (5, 5, 15, 15))
    assert not curves._meet((0, 0, 10, 10), (11, 0, 20, 10))


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    assert curves._round_speeds(0.9, 2.1) == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert curves._round_distances(0.9, 12.0) == [1.0, 2.0, 3.0, 5.0, 10.0]
