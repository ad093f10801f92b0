"""Quality against speed as a chart of a page: coordinates, colours and labels of points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from evaluation.line_charts import Tick

WIDTH, HEIGHT = 920, 380
LEFT, RIGHT, TOP, BASE = 46, 900, 14, 350
LETTER, LINE = 7.3, 13  # width and height of a letter of a name
PARTS = 24  # parts of a line, whose boxes keep names away
_ROUND = (1.0, 2.0, 5.0)
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class QualityPoint:
    """A variant: its speedup over plain drawing, its distance to it and that interval.

    Attributes:
        series: A line joins the variants of a series in their order.
    """

    name: str
    series: str
    speed: float
    distance: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Marker:
    """A point with the ends of its interval, the position of its name, and its tooltip."""

    name: str
    x: float
    y: float
    low: float
    high: float
    label: tuple[float, float]
    tip: str


@dataclass(frozen=True, slots=True)
class ScatterSeries:
    """The points of a series and the line through them."""

    css: str
    points: str
    places: list[Marker]


@dataclass(frozen=True, slots=True)
class Scatter:
    """All series over marks.

    Attributes:
        band: Top and height of the distance of plain drawing from itself.
    """

    series: list[ScatterSeries]
    rows: list[Tick]
    ticks: list[Tick]
    band: tuple[float, float] | None
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = RIGHT
    top: int = TOP
    base: int = BASE


def scatter(
    points: Sequence[QualityPoint], colours: Mapping[str, str], plain: tuple[float, float]
) -> Scatter:
    """Return the chart of points; the axis of distances is logarithmic.

    Args:
        points: At least one point.
        colours: Class of colour by series.
        plain: Interval of the distance of plain drawing from itself.
    """
    speeds = [1.0, *(point.speed for point in points)]
    slow, fast = min(speeds) - 0.08, max(speeds) + 0.12
    ends = [*plain, *(value for p in points for value in (p.distance, p.low, p.high))]
    positive = [value for value in ends if value > 0.0 and math.isfinite(value)]
    near, far = math.log(min(positive) / 1.2), math.log(max(positive) * 1.2)

    def x(speed: float) -> float:
        return round(LEFT + (speed - slow) / (fast - slow) * (RIGHT - LEFT), 1)

    def y(distance: float) -> float:
        part = (math.log(max(distance, math.exp(near))) - near) / (far - near)
        return round(BASE - part * (BASE - TOP), 1)

    occupied = _boxes([(point.series, x(point.speed), y(point.distance)) for point in points])
    places = {}
    for point in sorted(points, key=lambda each: -each.speed):
        label = _label(x(point.speed), y(point.distance), point.name, occupied)
        tip = f"{point.name}: {point.speed:.2f} times as fast, {point.distance:.2f} "
        tip += f"({point.low:.2f} to {point.high:.2f})"
        at = x(point.speed), y(point.distance)
        places[point.name] = Marker(point.name, *at, y(point.low), y(point.high), label, tip)
    series = []
    for name in dict.fromkeys(point.series for point in points):
        markers = [places[point.name] for point in points if point.series == name]
        line = " ".join(f"{place.x},{place.y}" for place in markers)
        series.append(ScatterSeries(colours[name], line, markers))
    band = (y(plain[1]), round(y(plain[0]) - y(plain[1]), 1))
    rows = [Tick(y(value), f"{value:g}") for value in _round(math.exp(near), math.exp(far))]
    ticks = [Tick(x(n / 5), f"{n / 5:g}×") for n in range(math.ceil(slow * 5), int(fast * 5) + 1)]
    return Scatter(series, rows, ticks, band)


def _round(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [step * 10.0**decade for decade in decades for step in _ROUND]
    return [value for value in values if low <= value <= high]


def _boxes(points: Sequence[tuple[str, float, float]]) -> list[Box]:
    """Return boxes around points (series, x, y) and along the lines of a series."""
    boxes = [(x - 6, y - 6, x + 6, y + 6) for _, x, y in points]
    for (one, x, y), (other, to_x, to_y) in pairwise(sorted(points, key=lambda point: point[0])):
        for part in range(1, PARTS) if one == other else ():
            at = x + part / PARTS * (to_x - x), y + part / PARTS * (to_y - y)
            boxes.append((at[0] - 3, at[1] - 3, at[0] + 3, at[1] + 3))
    return boxes


def _label(x: float, y: float, name: str, occupied: list[Box]) -> tuple[float, float]:
    """Return the start of a name at the first free place beside its point, and occupy it."""
    wide = LETTER * len(name)
    sides = [(x + 9, y + 4), (x - 9 - wide, y + 4), (x - wide / 2, y - 10), (x - wide / 2, y + 19)]
    for away in range(LINE, HEIGHT, LINE):
        sides += [(left, y + 4 + up * away) for up in (-1, 1) for left in (x + 9, x - 9 - wide)]
    boxes = [(left, base - LINE + 2, left + wide, base + 2) for left, base in sides]
    inside = [
        n for n, box in enumerate(boxes) if box[0] > LEFT and box[2] < WIDTH and TOP < box[3] < BASE
    ]
    free = (n for n in inside if not any(_cross(boxes[n], other) for other in occupied))
    chosen = next(free, inside[0] if inside else 0)
    occupied.append(boxes[chosen])
    return round(sides[chosen][0], 1), round(sides[chosen][1], 1)


def _cross(one: Box, other: Box) -> bool:
    difference = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    return not difference
