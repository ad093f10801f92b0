"""Line charts by the length of a document: coordinates and colours of measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

LEFT, TOP, BOTTOM = 48, 12, 26
LETTER = 6.6  # width of a letter of a name
LINE = 14  # height of a line of text
FEW = 3  # prompts below which a point is hollow
ROWS = 5  # approximate marks on the vertical axis
TICKS = 12  # most marks on the horizontal axis
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a length of a document, measured on `prompts` prompts."""

    length: int
    value: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Dot:
    """A point with its tooltip; `few` marks a point of few prompts."""

    x: float
    y: float
    tip: str
    few: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One variant: a line through its points, with its name at the end."""

    name: str
    css: str
    points: str
    dots: list[Dot]
    label: float


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over marks; `mark` is the y coordinate of a reference line or None."""

    lines: list[Line]
    rows: list[Tick]
    ticks: list[Tick]
    width: int
    height: int
    right: float
    mark: float | None = None
    left: int = LEFT

    @property
    def base(self) -> int:
        """The y coordinate of the horizontal axis."""
        return self.height - BOTTOM


Series = Mapping[str, Sequence[Point]]


def line_chart(
    series: Series,
    colours: Mapping[str, str],
    *,
    width: int,
    height: int,
    unit: str = "",
    mark: float | None = None,
    counted: tuple[str, str] = ("tokens", "prompt"),
) -> LineChart:
    """Return a chart of values by length.

    Args:
        series: At least one point of each name, from short to long.
        colours: Class of colour by name.
        width, height: Pixels.
        unit: Suffix of values; "%" for shares.
        mark: Value of a reference line.
        counted: Unit of lengths, and the singular of the unit of `Point.prompts`.
    """
    values = [point.value for points in series.values() for point in points]
    marks = _round_marks(min(values, default=0.0), max(values, default=1.0), mark)
    lengths = sorted({point.length for points in series.values() for point in points})
    right = width - LETTER * max((len(name) for name in series), default=0) - 14
    low, high = marks[0], marks[-1]
    first, last = lengths[0], lengths[-1]

    def x(length: int) -> float:
        part = (length - first) / (last - first) if last > first else 0.5
        return round(LEFT + 12 + part * (right - LEFT - 24), 2)

    def y(value: float) -> float:
        part = (value - low) / (high - low)
        return round(height - BOTTOM - part * (height - BOTTOM - TOP), 2)

    ends = _spread([y(points[-1].value) for points in series.values()], TOP, height - BOTTOM)
    lines = [
        Line(
            name,
            colours[name],
            " ".join(f"{x(point.length)},{y(point.value)}" for point in points),
            [
                Dot(
                    x(point.length),
                    y(point.value),
                    _tip(name, point, unit, counted),
                    point.prompts < FEW,
                )
                for point in points
            ],
            label,
        )
        for (name, points), label in zip(series.items(), ends, strict=True)
    ]
    rows = [Tick(y(value), _format(value, unit)) for value in marks]
    step = -(-len(lengths) // TICKS)
    ticks = _apart([Tick(x(length), f"{length:,}") for length in lengths[::step]])
    at = None if mark is None else y(mark)
    return LineChart(lines, rows, ticks, width, height, round(right, 2), at)


def _apart(ticks: Sequence[Tick]) -> list[Tick]:
    """Return the marks whose labels touch no other; the last one stays."""
    left = [tick.at - 0.5 * LETTER * (len(tick.text) + 1) for tick in ticks]
    kept: list[int] = []
    for number in reversed(range(len(ticks))):
        right = 2 * ticks[number].at - left[number]
        if not kept or right <= left[kept[-1]]:
            kept.append(number)
    return [ticks[number] for number in reversed(kept)]


def _round_marks(low: float, high: float, mark: float | None) -> list[float]:
    """Return evenly spaced round values from below the lowest to above the highest."""
    if mark is not None:
        low, high = min(low, mark), max(high, mark)
    span = max(high - low, 1e-3)
    power = 10.0 ** math.floor(math.log10(span / ROWS))
    step = next(each * power for each in STEPS if span / (each * power) <= ROWS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 9) for n in range(first, max(last, first + 1) + 1)]


def _spread(preferred: Sequence[float], top: float, bottom: float) -> list[float]:
    """Return y coordinates near the preferred ones, a line apart, within the chart."""
    order = sorted(range(len(preferred)), key=preferred.__getitem__)
    places = [0.0] * len(preferred)
    before = top - LINE
    for number in order:
        before = places[number] = max(preferred[number], before + LINE)
    after = bottom + LINE
    for number in reversed(order):
        after = places[number] = min(places[number], after - LINE)
    return [round(place, 2) for place in places]


def _tip(name: str, point: Point, unit: str, counted: tuple[str, str]) -> str:
    along, one = counted
    prompts = f"{point.prompts:,} {one}{'s' if point.prompts != 1 else ''}"
    return f"{name}, {point.length:,} {along}: {_format(point.value, unit)}, {prompts}"


def _format(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else f"{value:.2f}".rstrip("0").rstrip(".") + unit


def colours_by_name(names: Iterable[str]) -> dict[str, str]:
    """Return a class of colour for each name, in rotation."""
    return {name: f"s{number % 8}" for number, name in enumerate(dict.fromkeys(names))}
