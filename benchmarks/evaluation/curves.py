"""The picture of quality against speed: one line for each rule, drawn with Pillow.

Faster variants are to the right, and variants near plain decoding at the bottom. The band is the
distance of plain decoding from itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from PIL import Image, ImageDraw

from evaluation.lettering import INK, SOFT, Colour, font
from evaluation.pictures import BACKDROP, LINE
from ragspec.errors import InputError

WIDTH, HEIGHT = 860, 540
LEFT, RIGHT, TOP, BOTTOM = 62, 110, 92, 58
BAND: Colour = (226, 234, 226)
# Colour-blind readers can distinguish these colours.
COLOURS: tuple[Colour, ...] = (
    (0, 114, 178),
    (213, 94, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 140, 200),
    (150, 110, 20),
    (90, 90, 90),
    (170, 60, 60),
)
Box = tuple[float, float, float, float]  # left, top, right, bottom
_SHARP = 2  # factor of oversampling, for smooth lines
_STEPS = (1, 2, 3, 5, 10)


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One variant: its speedup over plain drawing and Frechet distance to it.

    Attributes:
        series: A line joins the points of a series in their order.
        setting: Label of the point.
        low, high: Interval of the distance.
    """

    series: str
    setting: str
    speed: float
    distance: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of the picture: from values to pixels; the axis of distances is logarithmic."""

    speeds: tuple[float, float]
    distances: tuple[float, float]

    def x(self, speed: float) -> float:
        """Return the x coordinate of a speed."""
        low, high = self.speeds
        return LEFT + (speed - low) / (high - low) * (WIDTH - LEFT - RIGHT)

    def y(self, distance: float) -> float:
        """Return the y coordinate of a distance, clipped to the axis."""
        low, high = (math.log(value) for value in self.distances)
        part = (math.log(max(distance, self.distances[0])) - low) / (high - low)
        return HEIGHT - BOTTOM - min(1.0, part) * (HEIGHT - TOP - BOTTOM)


def quality_curve(
    points: Sequence[CurvePoint],
    plain: tuple[float, float],
    *,
    title: str = "Quality against speed",
    note: str = "",
) -> Image.Image:
    """Return the picture of all points.

    Args:
        points: Points of all series.
        plain: Interval of the distance of plain decoding from itself.
        title: Title of the picture.
        note: Line below the title.

    Raises:
        InputError: There is no finite point.
    """
    finite = [p for p in points if math.isfinite(p.speed) and math.isfinite(p.distance)]
    if not finite:
        raise InputError("Expected at least one measured row, got none. Leave the picture out.")
    axes = _axes(finite, plain)
    canvas = Image.new("RGB", (WIDTH * _SHARP, HEIGHT * _SHARP), BACKDROP)
    draw = ImageDraw.Draw(canvas)
    band = _band(draw, axes, plain)
    _grid(draw, axes)
    _text(draw, (LEFT, 16), title, 20, INK)
    _text(draw, (LEFT, 42), note, 13, SOFT)
    names = dict.fromkeys(point.series for point in finite)
    groups = [
        ([point for point in finite if point.series == name], COLOURS[number % len(COLOURS)])
        for number, name in enumerate(names)
    ]
    for group, colour in groups:
        _intervals(draw, axes, group, colour)
    occupied = [box for group, colour in groups for box in _series(draw, axes, group, colour)]
    occupied.append(_band_name(draw, band, occupied))
    _labels(draw, axes, groups, occupied)
    return canvas.resize((WIDTH, HEIGHT), Image.Resampling.LANCZOS)


def _axes(points: Sequence[CurvePoint], plain: tuple[float, float]) -> Axes:
    fastest = max(1.2, *(point.speed for point in points))
    slowest = min(1.0, *(point.speed for point in points))
    room = 0.06 * (fastest - slowest)
    edges = [*plain, *(value for p in points for value in (p.distance, p.low, p.high))]
    positive = [value for value in edges if value > 0 and math.isfinite(value)] or [1.0]
    low, high = min(positive) / 1.25, max(positive) * 1.25
    return Axes((slowest - room, fastest + room), (low, max(high, 2 * low)))


def _band(draw: ImageDraw.ImageDraw, axes: Axes, plain: tuple[float, float]) -> Box:
    """Draw the band of plain decoding and return its box."""
    top, bottom = axes.y(plain[1]), axes.y(max(plain[0], axes.distances[0]))
    band = (LEFT, top, WIDTH - RIGHT, bottom)
    _box(draw, band, BAND)
    return band


def _band_name(draw: ImageDraw.ImageDraw, band: Box, occupied: Sequence[Box]) -> Box:
    """Write the name of the band into its first free corner."""
    name, (left, top, right, bottom) = "plain against plain", band
    wide, high = _wide(name, 12), 14
    columns, lines = (right - 6 - wide, left + 6), (bottom - 4 - high, top + 4)
    corners = [(x, y, x + wide, y + high) for y in lines for x in columns]
    free = (box for box in corners if not any(_cross(box, other) for other in occupied))
    chosen = next(free, corners[0])
    _text(draw, (chosen[0], (chosen[1] + chosen[3]) / 2), name, 12, SOFT, "lm")
    return chosen


def _grid(draw: ImageDraw.ImageDraw, axes: Axes) -> None:
    bottom = HEIGHT - BOTTOM
    for speed in _round_speeds(*axes.speeds):
        x = axes.x(speed)
        _line(draw, [(x, TOP), (x, bottom)], INK if speed == 1 else LINE)
        _text(draw, (x, bottom + 6), f"{speed:g}x", 13, SOFT, "ma")
    for distance in _round_distances(*axes.distances):
        y = axes.y(distance)
        _line(draw, [(LEFT, y), (WIDTH - RIGHT, y)], LINE)
        _text(draw, (LEFT - 8, y), f"{distance:g}", 13, SOFT, "rm")
    _line(draw, [(LEFT, bottom), (WIDTH - RIGHT, bottom)], SOFT)
    middle = (LEFT + WIDTH - RIGHT) / 2
    _text(draw, (middle, HEIGHT - 14), "speedup over plain decoding", 13, INK, "ms")
    _text(draw, (LEFT, TOP - 10), "Frechet distance to plain, less is better", 13, INK, "ls")


def _intervals(
    draw: ImageDraw.ImageDraw, axes: Axes, points: Sequence[CurvePoint], colour: Colour
) -> None:
    """Draw the interval of each point's distance."""
    for point in points:
        x = axes.x(point.speed)
        if math.isfinite(point.low) and math.isfinite(point.high):
            _line(draw, [(x, axes.y(point.low)), (x, axes.y(point.high))], _paler(colour))


def _series(
    draw: ImageDraw.ImageDraw, axes: Axes, points: Sequence[CurvePoint], colour: Colour
) -> list[Box]:
    """Draw the points of a series; return the boxes that they cover."""
    places = [(axes.x(point.speed), axes.y(point.distance)) for point in points]
    _line(draw, places, colour, 2.0)
    for x, y in places:
        _disc(draw, x, y, 4.5, colour)
    occupied = [box for start, end in pairwise(places) for box in _along(start, end)]
    return occupied + [(x - 6, y - 6, x + 6, y + 6) for x, y in places]


def _labels(
    draw: ImageDraw.ImageDraw,
    axes: Axes,
    groups: Sequence[tuple[Sequence[CurvePoint], Colour]],
    occupied: list[Box],
) -> None:
    """Write the setting of each point, then the name of each series beside its fastest point."""
    for points, colour in groups:
        for point in points:
            if point.setting:
                at = axes.x(point.speed), axes.y(point.distance)
                occupied.append(_label(draw, at, point.setting, (11, colour), occupied))
    for points, colour in groups:
        last = max((axes.x(point.speed), axes.y(point.distance)) for point in points)
        occupied.append(_label(draw, last, points[0].series, (13, colour), occupied))


def _label(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    style: tuple[int, Colour],
    occupied: Sequence[Box],
) -> Box:
    """Write a text beside a point, at the first free place."""
    size, colour = style
    boxes = _places(*at, _wide(text, size) + 3, size + 2)  # or two texts in a line run together
    inside = [box for box in boxes if _inside(box)]
    free = (box for box in inside if not any(_cross(box, other) for other in occupied))
    chosen = next(free, [*inside, boxes[0]][0])
    _text(draw, (chosen[0], (chosen[1] + chosen[3]) / 2), text, size, colour, "lm")
    return chosen


def _places(x: float, y: float, wide: float, high: float) -> list[Box]:
    """Return candidate boxes of a text, the best first: nearby, then in columns up and down."""
    columns = (x + 11, x - 11 - wide, x - wide / 2)
    corners = [(x + 11, y - 8), (x + 9, y - 21), (x - 11 - wide, y - 8), (x - wide / 2, y - 25)]
    for away in range(16, HEIGHT, 16):  # a line of text, and a little between them
        corners += [(left, y - 8 + side * away) for side in (1, -1) for left in columns]
    return [(left, top, left + wide, top + high) for left, top in corners]


def _wide(text: str, size: int) -> float:
    return float(font(size * _SHARP).getlength(text)) / _SHARP


def _inside(box: Box) -> bool:
    left, top, right, bottom = box
    return left > LEFT and right < WIDTH and top > TOP - 25 and bottom < HEIGHT - BOTTOM


def _along(start: tuple[float, float], end: tuple[float, float]) -> list[Box]:
    """Return small boxes that cover a line."""
    parts = [n / 10 for n in range(1, 10)]
    middles = [tuple(a + part * (b - a) for a, b in zip(start, end, strict=True)) for part in parts]
    return [(x - 3, y - 3, x + 3, y + 3) for x, y in middles]


def _cross(one: Box, other: Box) -> bool:
    difference = one[2] < other[0] or other[2] < one[0] or one[3] < other[1] or other[3] < one[1]
    return not difference


def _round_speeds(low: float, high: float) -> list[float]:
    step = next(s for s in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 1e9) if (high - low) / s <= 8)
    first = math.ceil(low / step)
    return [round(n * step, 6) for n in range(first, math.floor(high / step) + 1)]


def _round_distances(low: float, high: float) -> list[float]:
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    marks = {round(step * 10.0**decade, 9) for decade in decades for step in _STEPS}
    return sorted(value for value in marks if low <= value <= high)


def _paler(colour: Colour) -> Colour:
    red, green, blue = ((value + 2 * 235) // 3 for value in colour)
    return red, green, blue


def _line(
    draw: ImageDraw.ImageDraw,
    places: Sequence[tuple[float, float]],
    colour: Colour,
    width: float = 1.0,
) -> None:
    scaled = [(x * _SHARP, y * _SHARP) for x, y in places]
    draw.line(scaled, colour, round(width * _SHARP), joint="curve")


def _box(
    draw: ImageDraw.ImageDraw, corners: tuple[float, float, float, float], colour: Colour
) -> None:
    left, top, right, bottom = (value * _SHARP for value in corners)
    draw.rectangle((left, min(top, bottom), right, max(top, bottom)), colour)


def _disc(draw: ImageDraw.ImageDraw, x: float, y: float, radius: float, colour: Colour) -> None:
    for grown, fill in ((radius + 1.5, BACKDROP), (radius, colour)):
        corners = ((x - grown) * _SHARP, (y - grown) * _SHARP)
        draw.ellipse((*corners, (x + grown) * _SHARP, (y + grown) * _SHARP), fill)


def _text(
    draw: ImageDraw.ImageDraw,
    at: tuple[float, float],
    text: str,
    size: int,
    colour: Colour,
    anchor: str = "la",
) -> None:
    place = (at[0] * _SHARP, at[1] * _SHARP)
    letters = font(size * _SHARP)
    draw.text(place, text, colour, letters, anchor, stroke_width=_SHARP, stroke_fill=BACKDROP)
