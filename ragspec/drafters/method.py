"""What a drafting method is called, drafts from and needs: a descriptor in the method's own file.

A drafter class that can be named has it as `method`; a variant of one is a `Method` by itself. With
one line in `registry` it is all that the engine, the command line's help, the colours of the pages
and the README's table know of a method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError
from ragspec.registry import names, resolve

GLOBAL = "global"  # the scope of text that everybody may draft from

Drafters = Drafter | list[Drafter]

# What a method may need, and how to give it to an engine.
NEEDS = {
    "store": "pass ragspec.retrievers.CorpusIndex.open(folder).drafter() in the place of the name",
    "draft model": "pass draft_model=, or ragspec.ModelDrafter(model) in the place of the name",
    "head": "pass ragspec.drafters.HeadDrafter(folder) in the place of the name",
}


class Store(Protocol):
    """Text on disk to draft from, as methods see it."""

    def drafter(self, scope: str = GLOBAL, **options: Any) -> Drafter:
        """Return a drafter from the text of a scope, and everybody's."""


@dataclass(frozen=True, slots=True)
class Sources:
    """What methods may draft from beside the text itself; None for what there is not.

    corpus: a store of text. history: a store of the model's own answers. draft_model: a smaller
    transformers model. scope: whose text in the stores is drafted from, beside everybody's.
    second_choices: whether drafters will be told the target's best tokens; another program that
    lends its target's text alone tells none.
    """

    corpus: Any = None
    history: Any = None
    draft_model: Any = None
    scope: str = GLOBAL
    top_k_feedback: bool = True

    def past(self) -> list[Drafter]:
        """Return a drafter for each store there is, the model's own answers first."""
        named = (("history", self.history), ("corpus", self.corpus))
        return [store.drafter(self.scope, name=name) for name, store in named if store is not None]

    def models(self) -> list[Drafter]:
        """Return a drafter for the draft model, if there is one."""
        return [] if self.draft_model is None else [one("model", self)]

    def available(self) -> set[str]:
        """Return what is there, as `Method.needs` calls it."""
        stores = {"store"} if self.corpus is not None or self.history is not None else set()
        return stores | ({"draft model"} if self.draft_model is not None else set())


@dataclass(frozen=True, slots=True)
class Method:
    """One method by name.

    drafts_from, paper: what users read. make: how it is built from sources; None calls its class.
    needs: the sources that it cannot do without; uses: those that it takes where they are there.
    colour: that of its nodes on pages, 0 to 7; None takes a free one. listed: whether commands
    offer it by name.
    """

    drafts_from: str
    paper: str
    make: Callable[[Sources], Drafters] | None = None
    needs: frozenset[str] = frozenset()
    uses: frozenset[str] = frozenset()
    colour: int | None = None
    listed: bool = True


def describe(name: str) -> Method:
    """Return the descriptor of a method; raises UnknownNameError."""
    result = resolve("drafter", name)
    method: Method = result if isinstance(result, Method) else result.method
    return method


def build(name: str, sources: Sources) -> Drafters:
    """Return fresh drafters for a name; raises UnknownNameError, InputError for what is missing."""
    result, method = resolve("drafter", name), describe(name)
    for missing in sorted(method.needs - sources.available()):
        raise InputError(f"drafter {name!r} got no {missing}; expected one: {NEEDS[missing]}.")
    drafters: Drafters = result() if method.make is None else method.make(sources)
    return drafters


def one(name: str, sources: Sources) -> Drafter:
    """Return the fresh drafter of a method that is a single one; raises as `build` does."""
    drafter = build(name, sources)
    assert not isinstance(drafter, list), f"{name} is several drafters"
    return drafter


def listed() -> dict[str, Method]:
    """Return the methods that commands offer, in the order of the registry."""
    every = {name: describe(name) for name in names("drafter")}
    return {name: method for name, method in every.items() if method.listed}
