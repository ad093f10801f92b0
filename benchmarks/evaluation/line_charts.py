"""Lines along the length of a document: places and colours, computed from measured points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ragspec.pipelines.page.charts import Tick

LEFT, TOP, BOTTOM = 48, 12, 26
LETTER = 6.6  # the width of a letter of a line's name
LINE = 14  # the height of one
FEW = 3  # prompts
ROWS = 5  # marks on the vertical axis, about
TICKS = 12  # on the other, at most
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Point:
    """A value at a length of a document, and how many prompts it rests on."""

    length: int
    value: float
    prompts: int


@dataclass(frozen=True, slots=True)
class Dot:
    """A measured point, and what it says when pointed at; `few`: it rests on few prompts."""

    x: float
    y: float
    tip: str
    few: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One way: its points joined, its name at the end of it."""

    name: str
    css: str
    points: str
    dots: list[Dot]
    label: float


@dataclass(frozen=True, slots=True)
class LineChart:
    """Lines over marks; `mark` is the height of the line that is drawn through, if there is one."""

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
        """The height of the axis below the lines."""
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

    series: by name, points from short to long, at least one. unit: behind values;
    "%" for shares. mark: a value that the axis reaches, and that is drawn as a line. counted: what
    lengths are of, and what points rest on, one of them.
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
    rows = [Tick(y(value), _summary(value, unit)) for value in marks]
    every = -(-len(lengths) // TICKS)
    ticks = [Tick(x(length), f"{length:,}") for length in lengths[::every]]
    at = None if mark is None else y(mark)
    return LineChart(lines, rows, ticks, width, height, round(right, 2), at)


def _round_marks(low: float, high: float, mark: float | None) -> list[float]:
    """Return round values, evenly apart, from below the lowest to above the highest."""
    if mark is not None:
        low, high = min(low, mark), max(high, mark)
    room = max(high - low, 1e-3)
    power = 10.0 ** math.floor(math.log10(room / ROWS))
    step = next(each * power for each in STEPS if room / (each * power) <= ROWS)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(n * step, 9) for n in range(first, max(last, first + 1) + 1)]


def _spread(selection: Sequence[float], top: float, bottom: float) -> list[float]:
    """Return where names stand: near where they would, a line apart, within the chart."""
    order = sorted(range(len(selection)), key=selection.__getitem__)
    places = [0.0] * len(selection)
    before = top - LINE
    for number in order:
        before = places[number] = max(selection[number], before + LINE)
    after = bottom + LINE
    for number in reversed(order):
        after = places[number] = min(places[number], after - LINE)
    return [round(place, 2) for place in places]


def _tip(name: str, point: Point, unit: str, counted: tuple[str, str]) -> str:
    along, one = counted
    prompts = f"{point.prompts:,} {one}{'s' if point.prompts != 1 else ''}"
    return f"{name}, {point.length:,} {along}: {_summary(point.value, unit)}, {prompts}"


def _summary(value: float, unit: str) -> str:
    return f"{value:.0%}" if unit == "%" else f"{value:.2f}".rstrip("0").rstrip(".") + unit


def colours_by_name(names: Iterable[str]) -> dict[str, str]:
    """Return a class of colour for each name, in turn."""
    return {name: f"s{number % 8}" for number, name in enumerate(dict.fromkeys(names))}
