"""Who gave a token, and its colour: one colour a source, the same on every page.

The eight colours of the pages are told apart also with red-, green- or blue-blind eyes, and by
lightness alone for the most part; a source that the table does not know takes a free one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from zlib import crc32

from ragspec.acceptance.base import Step
from ragspec.drafters.method import describe
from ragspec.registry import names
from ragspec.trees.draft_tree import LAYOUT, PREDICTION

TARGET = "target model"
# Texts that are no documents count for themselves, whichever drafter copied from them.
COPIED: Mapping[int, str] = MappingProxyType({PREDICTION: "prediction", LAYOUT: "layout"})
COLOURS = 8
# Names of sources that are no methods: texts, and levels of methods.
OTHERS: Mapping[str, int] = MappingProxyType(
    {
        COPIED[PREDICTION]: 7,
        "corpus": 1,
        "history": 4,
        "answers": 4,
        "statistics": 6,
        COPIED[LAYOUT]: 6,
    }
)


def preferred() -> Mapping[str, int]:
    """Return the colour that a name would like; of names that share one the first keeps it."""
    methods = {name: describe(name).colour for name in names("drafter")}
    told = {name: colour for name, colour in methods.items() if colour is not None}
    listed = {name: told[name] for name in told if describe(name).listed}
    return MappingProxyType({**listed, **OTHERS, **told})


def sources_of(step: Step) -> list[str]:
    """Return the source of every node [N]: its drafter, or what COPIED calls its text."""
    tree = step.tree
    return [
        COPIED.get(document, tree.sources[source])
        for source, document in zip(tree.source.tolist(), tree.origin[:, 0].tolist(), strict=True)
    ]


def kept_of(step: Step) -> tuple[int, ...]:
    """Return the accepted nodes that stand in the output: a stop inside the path cuts it."""
    return step.path[: len(step.tokens)]


def count_sources(steps: Sequence[Step]) -> tuple[Counter[str], Counter[str]]:
    """Return by source the drafted tokens, and those that stand in the output."""
    drafted: Counter[str] = Counter()
    kept: Counter[str] = Counter()
    for step in steps:
        names = sources_of(step)
        drafted.update(names)
        kept.update(names[node] for node in kept_of(step))
    return drafted, kept


def colours_of(steps: Sequence[Step]) -> dict[str, str]:
    """Return the class of colour of every source that drafted, the most useful first."""
    drafted, kept = count_sources(steps)
    slots = slots_of(drafted)
    ranked = sorted(drafted, key=lambda name: (-kept[name], -drafted[name], name))
    return {name: f"s{slots[name]}" for name in ranked}


def slots_of(sources: Iterable[str]) -> dict[str, int]:
    """Return the number of each name's colour; up to as many names as colours get one each."""
    wanted, liked = dict.fromkeys(sources), preferred()
    known = [name for name in liked if name in wanted]
    slots: dict[str, int] = {}
    for name in (*known, *sorted(wanted.keys() - set(known))):
        first = liked.get(name, crc32(name.encode("utf-8", "replace")) % COLOURS)
        free = ((first + i) % COLOURS for i in range(COLOURS))
        slots[name] = next((slot for slot in free if slot not in slots.values()), first)
    return slots
