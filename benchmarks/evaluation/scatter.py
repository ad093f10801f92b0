"""Quality against speed as a chart of a page: places, colours and names of measured points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from ragspec.pipelines.page.charts import Tick

WIDTH, HEIGHT = 920, 380
LEFT, RIGHT, TOP, BASE = 46, 900, 14, 350
LETTER, LINE = 7.3, 13  # the width of a letter of a name, and its height
PARTS = 24  # of a line, each of which keeps names away
_ROUND = (1.0, 2.0, 5.0)
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Measured:
    """A way: how fast (times plain), how far from plain, and the interval of that distance.

    series: ways of one series are joined, in their order.
    """

    name: str
    series: str
    speed: float
    distance: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Place:
    """A point, the ends of its interval, where its name stands, and what it says."""

    name: str
    x: float
    y: float
    low: float
    high: float
    label: tuple[float, float]
    tip: str


@dataclass(frozen=True, slots=True)
class Joined:
    """The points of a series, and the line through them."""

    css: str
    points: str
    places: list[Place]


@dataclass(frozen=True, slots=True)
class Scatter:
    """All series over marks. band: top and height of what plain drawing is from itself."""

    series: list[Joined]
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
    points: Sequence[Measured], colours: Mapping[str, str], plain: tuple[float, float]
) -> Scatter:
    """Return the chart of points, at least one; distances stand on a logarithmic axis.

    colours: by series. plain: the interval of plain drawing against itself.
    """
    speeds = [1.0, *(point.speed for point in points)]
    slow, fast = min(speeds) - 0.08, max(speeds) + 0.12
    ends = [*plain, *(value for p in points for value in (p.distance, p.low, p.high))]
    known = [value for value in ends if value > 0.0 and math.isfinite(value)]
    near, far = math.log(min(known) / 1.2), math.log(max(known) * 1.2)

    def x(speed: float) -> float:
        return round(LEFT + (speed - slow) / (fast - slow) * (RIGHT - LEFT), 1)

    def y(distance: float) -> float:
        part = (math.log(max(distance, math.exp(near))) - near) / (far - near)
        return round(BASE - part * (BASE - TOP), 1)

    taken = _taken([(point.series, x(point.speed), y(point.distance)) for point in points])
    places = {}
    for point in sorted(points, key=lambda each: -each.speed):
        label = _label(x(point.speed), y(point.distance), point.name, taken)
        tip = f"{point.name}: {point.speed:.2f} times as fast, {point.distance:.2f} "
        tip += f"({point.low:.2f} to {point.high:.2f})"
        at = x(point.speed), y(point.distance)
        places[point.name] = Place(point.name, *at, y(point.low), y(point.high), label, tip)
    series = []
    for name in dict.fromkeys(point.series for point in points):
        current = [places[point.name] for point in points if point.series == name]
        line = " ".join(f"{place.x},{place.y}" for place in current)
        series.append(Joined(colours[name], line, current))
    band = (y(plain[1]), round(y(plain[0]) - y(plain[1]), 1))
    rows = [Tick(y(value), f"{value:g}") for value in _round(math.exp(near), math.exp(far))]
    ticks = [Tick(x(n / 5), f"{n / 5:g}×") for n in range(math.ceil(slow * 5), int(fast * 5) + 1)]
    return Scatter(series, rows, ticks, band)


def _round(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    results = [step * 10.0**decade for decade in decades for step in _ROUND]
    return [value for value in results if low <= value <= high]


def _taken(points: Sequence[tuple[str, float, float]]) -> list[Box]:
    """Return the room of points (series, x, y) and of the lines between those of a series."""
    results = [(x - 6, y - 6, x + 6, y + 6) for _, x, y in points]
    for (one, x, y), (other, to_x, to_y) in pairwise(sorted(points, key=lambda point: point[0])):
        for part in range(1, PARTS) if one == other else ():
            at = x + part / PARTS * (to_x - x), y + part / PARTS * (to_y - y)
            results.append((at[0] - 3, at[1] - 3, at[0] + 3, at[1] + 3))
    return results


def _label(x: float, y: float, name: str, taken: list[Box]) -> tuple[float, float]:
    """Return where a name begins, beside its point where there is room, and take that room."""
    wide = LETTER * len(name)
    sides = [(x + 9, y + 4), (x - 9 - wide, y + 4), (x - wide / 2, y - 10), (x - wide / 2, y + 19)]
    for away in range(LINE, HEIGHT, LINE):
        sides += [(left, y + 4 + up * away) for up in (-1, 1) for left in (x + 9, x - 9 - wide)]
    boxes = [(left, base - LINE + 2, left + wide, base + 2) for left, base in sides]
    inside = [
        n for n, box in enumerate(boxes) if box[0] > LEFT and box[2] < WIDTH and TOP < box[3] < BASE
    ]
    free = (n for n in inside if not any(_cross(boxes[n], other) for other in taken))
    chosen = next(free, inside[0] if inside else 0)
    taken.append(boxes[chosen])
    return round(sides[chosen][0], 1), round(sides[chosen][1], 1)


def _cross(one: Box, other: Box) -> bool:
    difference = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    return not difference
