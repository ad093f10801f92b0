"""The table of names: what a string such as `drafter="context"` stands for.

This is the one place where the core names the rooms, as strings that are imported on use.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ragspec.errors import InputError, UnknownNameError

NAMES: MappingProxyType[str, MappingProxyType[str, str]] = MappingProxyType(
    {
        "drafter": MappingProxyType(
            {
                "auto": "ragspec.retrievers.auto:AutoDrafter",
                "context": "ragspec.retrievers.context:ContextDrafter",
                "head": "ragspec.head_drafter:HeadDrafter",
                "hierarchy": "ragspec.retrievers.hierarchy:HierarchyDrafter",
                "jacobi": "ragspec.visual.jacobi:JacobiDrafter",
                "lookup": "ragspec.retrievers.lookup:LookupDrafter",
                "match": "ragspec.retrievers.select:MatchDrafter",
                "ngrams": "ragspec.retrievers.ngrams:NGramDrafter",
                "rasd": "ragspec.retrievers.rasd:Rasd",
                "recycling": "ragspec.retrievers.recycling:NeighbourDrafter",
                "suffix": "ragspec.retrievers.suffix:SuffixDrafter",
                "model": "ragspec.model_drafter:ModelDrafter",
                "synthetic": "ragspec.synthetic:SyntheticDrafter",
            }
        ),
        "rule": MappingProxyType(
            {
                "walk": "ragspec.rules:Walk",
                "rejection": "ragspec.rejection:ChainRejection",
                "multi-step": "ragspec.rejection:MultiStep",
                "without-replacement": "ragspec.rejection:WithoutReplacement",
                "k-seq": "ragspec.kseq:KSeq",
                "block": "ragspec.block:Block",
                "typical": "ragspec.typical:Typical",
                "lantern": "ragspec.visual.lantern:Lantern",
                "lantern++": "ragspec.visual.lantern:LanternPlus",
                "gsd": "ragspec.visual.lantern:GSD",
                "cool": "ragspec.visual.cool:Cool",
                "lantern-rejection": "ragspec.visual.published:LanternRejection",
                "lantern++-rejection": "ragspec.visual.published:LanternPlusRejection",
            }
        ),
    }
)

_NEEDING: MappingProxyType[tuple[str, str], str] = MappingProxyType(
    {
        ("drafter", "rest"): "drafter 'rest' got no store; expected one: pass "
        "ragspec.retrievers.CorpusIndex.open(folder).drafter() in the place of the name.",
    }
)


def resolve(kind: str, name: str) -> Any:
    """Return the class that `name` stands for among the names of a kind ("drafter", "rule").

    Raises UnknownNameError, with the nearest names, when nothing answers to it, and InputError for
    what cannot be made without more than its name.
    """
    table = NAMES.get(kind)
    if table is None:
        raise UnknownNameError(unknown("kind of name", kind, NAMES))
    if (kind, name) in _NEEDING:
        raise InputError(_NEEDING[kind, name])
    where = table.get(name)
    if where is None:
        raise UnknownNameError(unknown(kind, name, table))
    module, _, attribute = where.partition(":")
    return getattr(import_module(module), attribute)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name that nothing answers to."""
    names = sorted(known)
    return f"unknown {kind} {name!r}.{did_you_mean(name, names)} Known: {', '.join(names)}."


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x' or 'y'?" with the nearest known names, "" where none is near."""
    lowered = {candidate.lower(): candidate for candidate in sorted(known) if candidate != name}
    near = difflib.get_close_matches(name.lower(), lowered, n=2, cutoff=0.6)
    hint = " or ".join(repr(lowered[candidate]) for candidate in near)
    return f" Did you mean {hint}?" if hint else ""
