"""The table of names: what a string such as `drafter="context"` stands for.

This is the one place where the core names the rooms, as strings that are imported on use.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from ragspec.errors import MissingExtraError, UnknownNameError

# The extra that brings a package which not everybody needs.
EXTRAS = MappingProxyType(
    {
        "diffusers": "images",
        "PIL": "images",
        "datasets": "data",
        "pyarrow": "data",
        "gguf": "gguf",
        "peft": "adapters",
        "torchao": "int8",
        "faiss": "cpu",
        "fastapi": "serve",
        "uvicorn": "serve",
        "prometheus_client": "serve",
        "ray": "ray",
        "langchain_core": "langchain",
        "llama_index": "llamaindex",
        "haystack": "haystack",
        "lm_eval": "lm-eval",
    }
)

NAMES: MappingProxyType[str, MappingProxyType[str, str]] = MappingProxyType(
    {
        "drafter": MappingProxyType(
            {
                "context": "ragspec.retrievers.methods.context:ContextDrafter",
                "lookup": "ragspec.retrievers.methods.prompt_lookup:LookupDrafter",
                "match": "ragspec.retrievers.methods.sam_decoding:MatchDrafter",
                "suffix": "ragspec.retrievers.methods.suffix_decoding:SuffixDrafter",
                "recycling": "ragspec.retrievers.methods.token_recycling:NeighbourDrafter",
                "recycling-paper": "ragspec.retrievers.methods.token_recycling:PAPER",
                "rest": "ragspec.retrievers.corpus.rest:RestDrafter",
                "select": "ragspec.retrievers.methods.sam_decoding:Select",
                "hierarchy": "ragspec.retrievers.methods.hierarchy_drafting:HierarchyDrafter",
                "rasd": "ragspec.retrievers.methods.rasd:Rasd",
                "rapid": "ragspec.retrievers.rapid.drafter:Rapid",
                "auto": "ragspec.retrievers.methods.auto:AutoDrafter",
                "model": "ragspec.drafters.model.drafter:ModelDrafter",
                "fused": "ragspec.drafters.model.drafter:FUSED",
                "head": "ragspec.drafters.eagle.drafter:HeadDrafter",
                "jacobi": "ragspec.visual.drafting.jacobi:JacobiDrafter",
                "ngrams": "ragspec.retrievers.methods.ngrams:NGramDrafter",
            }
        ),
        "rule": MappingProxyType(
            {
                "walk": "ragspec.acceptance.walk:Walk",
                "rejection": "ragspec.acceptance.rejection:ChainRejection",
                "multi-step": "ragspec.acceptance.rejection:MultiStep",
                "without-replacement": "ragspec.acceptance.rejection:WithoutReplacement",
                "k-seq": "ragspec.acceptance.k_seq:KSeq",
                "block": "ragspec.acceptance.block_verification:Block",
                "typical": "ragspec.acceptance.typical:Typical",
                "lantern": "ragspec.visual.acceptance.lantern:Lantern",
                "lantern++": "ragspec.visual.acceptance.lantern:LanternPlus",
                "gsd": "ragspec.visual.acceptance.lantern:GSD",
            }
        ),
    }
)


def names(kind: str) -> Mapping[str, str]:
    """Return the names of a kind ("drafter", "rule") and where each leads; UnknownNameError."""
    if kind not in NAMES:
        raise UnknownNameError(unknown("kind of name", kind, NAMES))
    return NAMES[kind]


def resolve(kind: str, name: str) -> Any:
    """Return what `name` stands for among the names of a kind ("drafter", "rule"): a class, mostly.

    Raises UnknownNameError, with the nearest names, when nothing answers to it.
    """
    table = names(kind)
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


def for_extra(error: ModuleNotFoundError) -> ImportError:
    """Return what a missing package means for the user: the extra that brings it, if one does."""
    package = (error.name or "").partition(".")[0]
    if package not in EXTRAS:
        return error
    return MissingExtraError(
        f"this needs the package {package}, which is not installed. Install it: pip install "
        f"'ragspec[{EXTRAS[package]}]'."
    )


def door(
    package: str, where: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package whose public names are imported on first use.

    where: for each public name the module that has it. What the table above names in a folder
    is public there too, so that a new method needs one line there and none at the door.
    """
    held = vars(sys.modules[package])
    entries = (line.partition(":") for table in NAMES.values() for line in table.values())
    named = {what: module for module, _, what in entries if module.startswith(f"{package}.")}
    places = {**named, **where} if "." in package else where

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            held[name] = getattr(import_module(places[name]), name)
        except ModuleNotFoundError as error:
            raise for_extra(error) from error
        return held[name]

    return get, lambda: sorted({*held, *places})
