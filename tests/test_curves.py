"""The picture of quality against speed: where values stand, and that it is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from ragspec.errors import InputError
from ragspec.visual import curves
from ragspec.visual.curves import Axes, CurvePoint, quality_curve

POINTS = [
    CurvePoint("walk", "", 1.4, 1.5, 1.0, 2.0),
    CurvePoint("lantern", "0.05", 1.6, 4.0, 3.0, 5.0),
    CurvePoint("lantern", "0.1", 1.9, 9.0, 7.0, 12.0),
]


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


@pytest.mark.parametrize("speed", [1.0, 1.4, 3.0])
@pytest.mark.parametrize("distance", [1.0, 9.0, 80.0])
def test_names_do_not_lie_on_each_other(
    monkeypatch: pytest.MonkeyPatch, speed: float, distance: float
) -> None:
    """Eight series end at about one place, in every part of the picture."""
    write, placed = curves._name, list[curves.Box]()

    def name(draw: Any, at: Any, text: str, colour: Any, taken: Sequence[curves.Box]) -> curves.Box:
        box = write(draw, at, text, colour, taken)
        assert not [other for other in taken if curves._meet(box, other)]
        placed.append(box)
        return box

    monkeypatch.setattr(curves, "_name", name)
    ends = [CurvePoint("end", "", s, d, d, d) for s, d in ((1.0, 1.0), (3.0, 80.0))]
    crowd = [
        CurvePoint(f"lantern++ {n}", "5", speed + 0.002 * n, distance, distance, distance)
        for n in range(8)
    ]
    quality_curve([*ends, *crowd], (0.8, 2.5))
    assert len(placed) == 9
    assert all(left > 0 and right < curves.WIDTH for left, _, right, _ in placed)
    assert all(top > 0 and bottom < curves.HEIGHT for _, top, _, bottom in placed)
    assert not any(curves._meet(*pair) for pair in combinations(placed, 2))


def test_boxes_meet_where_they_share_a_place() -> None:
    assert curves._meet((0, 0, 10, 10), (5, 5, 15, 15))
    assert not curves._meet((0, 0, 10, 10), (11, 0, 20, 10))


def test_ticks_are_round_numbers_inside_the_axis() -> None:
    assert curves._round_speeds(0.9, 2.1) == [1.0, 1.2, 1.4, 1.6, 1.8, 2.0]
    assert curves._round_distances(0.9, 12.0) == [1.0, 2.0, 3.0, 5.0, 10.0]
