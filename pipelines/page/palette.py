"""Who gave a token, and its colour: one colour a source, the same on every page.

The eight colours of the pages are told apart also with red-, green- or blue-blind eyes, and by
lightness alone for the most part; a source that the table does not know takes a free one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from zlib import crc32

from ragspec.drafters.method import describe
from ragspec.registry import names
from ragspec.reports.builder import count_sources
from ragspec.rules.base import Step

TARGET = "target model"
COLOURS = 8
# Names of sources that are no methods: texts, and levels of methods.
OTHERS: Mapping[str, int] = MappingProxyType(
    {
        "prediction": 7,
        "corpus": 1,
        "history": 4,
        "answers": 4,
        "statistics": 6,
        "layout": 6,
    }
)


def preferred() -> Mapping[str, int]:
    """Return the colour that a name would like; of names that share one the first keeps it."""
    methods = {name: describe(name).colour for name in names("drafter")}
    record = {name: colour for name, colour in methods.items() if colour is not None}
    listed = {name: record[name] for name in record if describe(name).listed}
    return MappingProxyType({**listed, **OTHERS, **record})


def colours_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the class of colour of every source that drafted, the most useful first."""
    drafted, selected = count_sources(steps)
    slots = slots_of(drafted)
    ranked = sorted(drafted, key=lambda name: (-selected[name], -drafted[name], name))
    return {name: f"s{slots[name]}" for name in ranked}


def slots_of(sources: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's colour; up to as many names as colours get one each."""
    selection, liked = dict.fromkeys(sources), preferred()
    known = [name for name in liked if name in selection]
    slots: dict[str, int] = {}
    for name in (*known, *sorted(selection.keys() - set(known))):
        first = liked.get(name, crc32(name.encode("utf-8", "replace")) % COLOURS)
        free = ((first + i) % COLOURS for i in range(COLOURS))
        slots[name] = next((slot for slot in free if slot not in slots.values()), first)
    return slots
