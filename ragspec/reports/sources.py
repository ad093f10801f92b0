"""Who gave a token: one answer for reports, terminals, pages and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ragspec.acceptance.base import Step
from ragspec.trees.draft_tree import LAYOUT, PREDICTION

# Texts that are no documents count for themselves, whichever drafter copied from them.
COPIED: Mapping[int, str] = MappingProxyType({PREDICTION: "prediction", LAYOUT: "layout"})


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
