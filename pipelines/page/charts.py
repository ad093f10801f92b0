"""Charts of a trace, and the colours of sources: one for each source, the same on every page.

The eight colours are distinguishable for red-, green- and blue-blind readers too, and mostly by
lightness alone. A source without a colour of its own takes a free one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from zlib import crc32

from ragspec.drafters.method import describe
from ragspec.registry import names
from ragspec.reports.generation import accepted_of, count_sources, sources_of
from ragspec.reports.report import Event
from ragspec.rules.base import Step

TARGET = "target model"
COLOURS = 8
# Sources that are no methods: texts, and levels of methods.
OTHERS: Mapping[str, int] = MappingProxyType(
    {"prediction": 7, "corpus": 1, "history": 4, "answers": 4, "statistics": 6, "layout": 6}
)


def preferred() -> Mapping[str, int]:
    """Return the preferred colour of each name; the first of names that share one has priority."""
    methods = {name: describe(name).colour for name in names("drafter")}
    record = {name: colour for name, colour in methods.items() if colour is not None}
    listed = {name: record[name] for name in record if describe(name).listed}
    return MappingProxyType({**listed, **OTHERS, **record})


def colours_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the colour class of every source that drafted, the most accepted first."""
    drafted, accepted = count_sources(steps)
    slots = slots_of(drafted)
    ranked = sorted(drafted, key=lambda name: (-accepted[name], -drafted[name], name))
    return {name: f"s{slots[name]}" for name in ranked}


def slots_of(sources: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's colour; up to eight names have distinct ones."""
    names, liked = dict.fromkeys(sources), preferred()
    slots: dict[str, int] = {}
    for name in (*filter(names.__contains__, liked), *sorted(names.keys() - liked.keys())):
        first = liked.get(name, crc32(name.encode("utf-8", "replace")) % COLOURS)
        free = ((first + i) % COLOURS for i in range(COLOURS))
        slots[name] = next((slot for slot in free if slot not in slots.values()), first)
    return slots


WIDTH, LEFT, RIGHT, BOTTOM, TOP = 960, 42, 12, 22, 8
ROOM = WIDTH - LEFT - RIGHT
STEPS_HEIGHT = 168
LANES_LEFT, LANES_HEIGHT = 84, 104
FEWEST = 24  # least columns that a chart has room for, so that few columns stay narrow
BASES = (1, 2, 5)


@dataclass(frozen=True, slots=True)
class Bar:
    """A coloured rectangle of a chart, in the chart's units."""

    x: float
    y: float
    width: float
    height: float
    css: str


@dataclass(frozen=True, slots=True)
class Column:
    """A full-height column of a chart, with the number of its step or event and a tooltip."""

    number: int
    x: float
    width: float
    tip: str


@dataclass(frozen=True, slots=True)
class Tick:
    """A label on an axis."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """Stacked bars in columns; `mean` is the height of the mean line, if there is one."""

    bars: list[Bar]
    columns: list[Column]
    rows: list[Tick]
    ticks: list[Tick]
    height: int
    mean: float | None = None
    width: int = WIDTH
    left: int = LEFT
    bottom: int = BOTTOM

    @property
    def base(self) -> int:
        """The height of the axis below the bars."""
        return self.height - self.bottom


def first_number(steps: Sequence[Step]) -> int:
    """Return the number of the first step: 0 if it is the prefill, which has no draft."""
    return 0 if steps and "prefill" in steps[0].milliseconds else 1


def step_chart(steps: Sequence[Step], colours: Mapping[str, str]) -> Chart:
    """Return the tokens that each step emitted, by source."""
    longest = max([1, *(len(step.tokens) for step in steps)])
    slot = ROOM / max(len(steps), FEWEST)
    base = STEPS_HEIGHT - BOTTOM
    unit = (base - TOP) / longest
    first = first_number(steps)
    bars: list[Bar] = []
    columns: list[Column] = []
    for place, step in enumerate(steps):
        names, accepted = sources_of(step), accepted_of(step)
        parts = Counter(names[node] for node in accepted)
        parts[TARGET] = len(step.tokens) - len(accepted)
        x = LEFT + place * slot
        bars += _stacked(parts, colours, x, slot, base, unit)
        tip = f"step {first + place}: {_summary(parts, colours)}; {len(step.tree)} drafted"
        columns.append(Column(first + place, round(x, 2), round(slot, 2), tip))
    mean = sum(len(step.tokens) for step in steps) / max(len(steps), 1)
    ticks = [
        Tick(round(LEFT + (n - first + 0.5) * slot, 2), str(n))
        for n in _round_numbers(len(steps) - 1 + first, 12)
    ]
    rows = [Tick(round(base - n * unit, 2), str(n)) for n in _round_numbers(longest, 5)]
    return Chart(bars, columns, rows, ticks, STEPS_HEIGHT, round(base - mean * unit, 2))


def search_chart(events: Sequence[Event]) -> Chart:
    """Return a timeline of the strides and searches of a text, in two lanes."""
    whole = max([1.0, *(event.start + event.milliseconds for event in events)])
    unit, base = (WIDTH - LANES_LEFT - RIGHT) / whole, LANES_HEIGHT - BOTTOM
    lane = (base - TOP) / 2
    bars: list[Bar] = []
    columns: list[Column] = []
    for number, event in enumerate(events):
        if event.what == "guess":
            continue
        x, width = LANES_LEFT + event.start * unit, max(event.milliseconds * unit, 0.8)
        css, message = _kind(event)
        y = TOP + (lane if event.what == "search" else 0.0)
        bars.append(Bar(round(x, 2), round(y, 2), round(width, 2), round(lane - 6.0, 2), css))
        tip = f"{message}: {event.milliseconds:.0f} ms from {event.start:.0f} ms on"
        columns.append(Column(number, round(x, 2), round(width, 2), tip))
    rows = [
        Tick(round(TOP + place * lane + lane / 2, 2), name)
        for place, name in enumerate(("written", "searched"))
    ]
    ticks = [
        Tick(round(LANES_LEFT + n * unit, 2), f"{n} ms") for n in _round_numbers(int(whole), 10)
    ]
    return Chart(bars, columns, rows, ticks, LANES_HEIGHT, left=LANES_LEFT)


def _kind(event: Event) -> tuple[str, str]:
    """Return the colour class and the name of an event."""
    if event.what == "search":
        several = f"{event.queries} queries" if event.queries > 1 else "1 query"
        return "s2", f"search of {several}"
    if not event.accepted:
        return "own", "stride taken back"
    if event.what == "ahead":
        return "s1", "stride written during a search"
    return "s0", "stride"


def _stacked(
    parts: Mapping[str, int],
    colours: Mapping[str, str],
    x: float,
    slot: float,
    base: float,
    unit: float,
) -> Iterator[Bar]:
    """Yield the bars of one column from the axis up, the target's last."""
    width = max(slot - min(3.0, slot / 4), 0.5)
    top = float(base)
    for name, n in _ordered(parts, colours):
        top -= n * unit
        css = colours.get(name, "own")
        yield Bar(round(x, 2), round(top, 2), round(width, 2), round(n * unit, 3), css)


def _ordered(parts: Mapping[str, int], colours: Mapping[str, str]) -> list[tuple[str, int]]:
    names = dict.fromkeys((*colours, TARGET))
    return [(name, parts[name]) for name in names if parts.get(name)]


def _summary(parts: Mapping[str, int], colours: Mapping[str, str]) -> str:
    return ", ".join(f"{n} of {name}" for name, n in _ordered(parts, colours)) or "no token"


def _round_numbers(largest: int, most: int, least: int = 1) -> list[int]:
    """Return at most `most` multiples up to `largest` of a round number, at least `least`."""
    if largest < least:
        return []
    steps = (base * 10**power for power in range(9) for base in BASES)
    step = next(step for step in steps if step >= least and largest / step <= most)
    return list(range(step, largest + 1, step))
