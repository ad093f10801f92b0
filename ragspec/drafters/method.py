"""Descriptors of drafting methods: their sources, needs and papers, each in the method's own file.

A drafter class with a name has its descriptor as `method`; a variant of a class is a `Method` by
itself. The engine, the command line's help, the colours of the pages and the README's table use
only this descriptor and one line in `registry`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.drafters.base import Drafter, expect_drafter
from ragspec.errors import InputError
from ragspec.registry import entries, resolve

GLOBAL = "global"  # the scope of text that all tenants may draft from

# The needs of methods, and how to pass each one to an engine.
NEEDS = {
    "store": "pass ragspec.retrievers.CorpusIndex.open(folder).drafter() in the place of the name",
    "draft model": "pass draft_model=, or ragspec.ModelDrafter(model) in the place of the name",
    "head": "pass ragspec.drafters.HeadDrafter(folder) in the place of the name",
    "table": "a model with a file next_tokens.npy in its folder, such as smollm2",
}


@dataclass(frozen=True, slots=True)
class Sources:
    """The sources of a method beside the text itself; None for a missing one.

    Attributes:
        corpus: A store of text, with a method `drafter(scope, **options)`.
        history: Such a store of the model's own answers.
        draft_model: A smaller transformers model.
        table: The file of the target's table of next tokens.
        scope: Scope of the stores to draft from, in addition to global text.
        top_k_feedback: Whether steps include the target's best tokens, not tokens alone.
    """

    corpus: Any = None
    history: Any = None
    draft_model: Any = None
    table: Path | None = None
    scope: str = GLOBAL
    top_k_feedback: bool = True

    def past(self) -> list[Drafter]:
        """Return a drafter for each store, the model's own answers first."""
        named = (("history", self.history), ("corpus", self.corpus))
        return [store.drafter(self.scope, name=name) for name, store in named if store is not None]

    def models(self) -> list[Drafter]:
        """Return the drafter over the draft model; empty without one."""
        return [] if self.draft_model is None else [resolve("drafter", "model")(self.draft_model)]

    def available(self) -> set[str]:
        """Return the names of the sources, as in `Method.needs`."""
        store = self.history if self.corpus is None else self.corpus
        named = {"store": store, "draft model": self.draft_model, "table": self.table}
        return {name for name, source in named.items() if source is not None}


@dataclass(frozen=True, slots=True)
class Method:
    """The descriptor of a drafting method.

    Attributes:
        drafts_from, paper: Texts for help and README.
        make: Builds the drafters from sources; None calls the class.
        needs: Required sources, keys of `NEEDS`.
        uses: Further sources that it uses if they are available.
        colour: Colour of its nodes on pages, 0 to 7; None for a free one.
        listed: Whether commands offer it by name.
    """

    drafts_from: str
    paper: str
    make: Callable[[Sources], Drafter | list[Drafter]] | None = None
    needs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    colour: int | None = None
    listed: bool = True

    @property
    def method(self) -> "Method":
        """The descriptor itself, as for a class with one."""
        return self


def build(name: str, sources: Sources) -> list[Drafter]:
    """Return fresh drafters of a method, which an engine fuses.

    Raises:
        UnknownNameError: No method has this name.
        InputError: A required source is missing, or the entry point leads to no drafter.
    """
    entry = resolve("drafter", name)
    method: Method = entry.method
    for missing in sorted(method.needs - sources.available()):
        raise InputError(f"drafter {name!r} got no {missing}; expected one: {NEEDS[missing]}.")
    built = method.make(sources) if method.make else entry()
    return [expect_drafter(each) for each in (built if isinstance(built, list) else [built])]


def listed() -> dict[str, Method]:
    """Return the methods that commands offer, in the order of the registry."""
    return {name: each.method for name, each in entries("drafter") if each.method.listed}
