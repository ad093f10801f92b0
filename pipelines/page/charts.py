"""Bars of a trace, and the colours of sources: one for each source, the same on every page.

The eight colours are distinguishable for red-, green- and blue-blind readers too, and mostly by
lightness alone. A source without a colour of its own takes a free one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from zlib import crc32

from ragspec.drafters.method import describe
from ragspec.registry import names
from ragspec.reports.generation import accepted_of, count_sources, sources_of
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


MOST_NUMBERS = 12  # columns of a chart with their number below


@dataclass(frozen=True, slots=True)
class StepColumn:
    """The tokens of one step: colour class and number of each part, the lowest first."""

    number: int
    parts: list[tuple[str, int]]
    tip: str


@dataclass(frozen=True, slots=True)
class StepChart:
    """The tokens that each step emitted: the most, and the mean."""

    columns: list[StepColumn]
    most: int
    mean: float

    @property
    def every(self) -> int:
        """A round number; the columns whose number it divides have it below."""
        steps = (base * int(10**power) for power in count() for base in (1, 2, 5))
        return next(step for step in steps if len(self.columns) <= step * MOST_NUMBERS)


def first_number(steps: Sequence[Step]) -> int:
    """Return the number of the first step: 0 if it is the prefill, which has no draft."""
    return 0 if steps and "prefill" in steps[0].milliseconds else 1


def step_chart(steps: Sequence[Step], colours: Mapping[str, str]) -> StepChart:
    """Return the tokens that each step emitted, by source."""
    columns: list[StepColumn] = []
    for number, step in enumerate(steps, first_number(steps)):
        names, accepted = sources_of(step), accepted_of(step)
        counts = Counter(names[node] for node in accepted)
        counts[TARGET] = len(step.tokens) - len(accepted)
        ordered = [name for name in dict.fromkeys((*colours, TARGET)) if counts[name]]
        parts = [(colours.get(name, "own"), counts[name]) for name in ordered]
        what = ", ".join(f"{counts[name]} of {name}" for name in ordered) or "no token"
        tip = f"step {number}: {what}; {len(step.tree)} drafted"
        columns.append(StepColumn(number, parts, tip))
    lengths = [len(step.tokens) for step in steps]
    return StepChart(columns, max([1, *lengths]), sum(lengths) / max(len(steps), 1))
