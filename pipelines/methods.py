"""The drafting methods by name, built from the stores at hand.

Each name stands for one drafter (or several, which the engine fuses), as a user would build it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ragspec.drafters.base import Drafter
from ragspec.errors import InputError, UnknownNameError
from ragspec.registry import unknown
from ragspec.retrievers.corpus.catalogue import GLOBAL

if TYPE_CHECKING:
    from ragspec.retrievers.corpus.index import CorpusIndex

Drafters = Drafter | list[Drafter]


@dataclass(frozen=True, slots=True)
class Sources:
    """What methods may draft from beside the text itself; None for what there is not.

    corpus: a store of text. history: a store of the model's own answers. draft_model: a smaller
    transformers model. scope: whose text in the stores is drafted from, beside everybody's.
    """

    corpus: CorpusIndex | None = None
    history: CorpusIndex | None = None
    draft_model: Any = None
    scope: str = GLOBAL

    def past(self) -> list[Drafter]:
        """Return a drafter for each store there is, the model's own answers first."""
        named = (("history", self.history), ("corpus", self.corpus))
        return [store.drafter(self.scope, name=name) for name, store in named if store is not None]

    def models(self) -> list[Drafter]:
        """Return a drafter for the draft model, if there is one."""
        from ragspec.drafters.model.drafter import ModelDrafter

        return [] if self.draft_model is None else [ModelDrafter(self.draft_model)]


def _context(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.context import ContextDrafter

    return ContextDrafter()


def _model(sources: Sources) -> Drafters:
    return sources.models()


def _fused(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.context import ContextDrafter

    return [ContextDrafter(), *sources.models()]


def _lookup(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.prompt_lookup import LookupDrafter

    return LookupDrafter()


def _match(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.sam_decoding import MatchDrafter

    return MatchDrafter()


def _rest(sources: Sources) -> Drafters:
    return sources.past()


def _recycling(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.token_recycling import NeighbourDrafter

    return NeighbourDrafter()


def _recycling_paper(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.token_recycling import NeighbourDrafter

    return NeighbourDrafter.paper()


def _suffix(sources: Sources) -> Drafters:
    from ragspec.drafters.fuse import Fuse
    from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter

    past = sources.past()
    return SuffixDrafter(Fuse(past, "past") if len(past) > 1 else past[0] if past else None)


def _select(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.sam_decoding import MatchDrafter, Select
    from ragspec.retrievers.methods.token_recycling import NeighbourDrafter

    return Select([MatchDrafter(), *sources.past()], NeighbourDrafter())


def _hierarchy(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter

    answers, text = sources.history, sources.corpus
    return HierarchyDrafter(
        model_store=None if answers is None else answers.drafter(sources.scope),
        corpus=None if text is None else text.drafter(sources.scope),
    )


def _rasd(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.context import ContextDrafter
    from ragspec.retrievers.methods.rasd import Rasd
    from ragspec.retrievers.methods.token_recycling import NeighbourDrafter

    first, *others = [*sources.models(), NeighbourDrafter()]
    return Rasd(first, [ContextDrafter(), *sources.past(), *others])


def _auto(sources: Sources) -> Drafters:
    from ragspec.retrievers.methods.auto import AutoDrafter

    drafter = AutoDrafter(*sources.past())
    return [drafter, *sources.models()] if sources.models() else drafter


@dataclass(frozen=True, slots=True)
class Method:
    """How one drafting method is built, and which of the sources it cannot do without."""

    build: Callable[[Sources], Drafters]
    needs: frozenset[str] = frozenset()


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "context": Method(_context),
        "model": Method(_model, frozenset({"draft model"})),
        "fused": Method(_fused, frozenset({"draft model"})),
        "lookup": Method(_lookup),
        "match": Method(_match),
        "rest": Method(_rest, frozenset({"store"})),
        "recycling": Method(_recycling),
        "recycling-paper": Method(_recycling_paper),
        "suffix": Method(_suffix),
        "select": Method(_select),
        "hierarchy": Method(_hierarchy),
        "rasd": Method(_rasd),
        "auto": Method(_auto),
    }
)


_GIVEN = {"store": "--store or --history", "draft model": "--draft-model"}

STORED = frozenset({"rest", "suffix", "select", "hierarchy", "rasd", "auto"})


def build_method(name: str, sources: Sources) -> Drafters | None:
    """Return fresh drafters for a name, None for "plain".

    Raises UnknownNameError for another name, InputError where a source is missing.
    """
    if name == "plain":
        return None
    if name not in METHODS:
        raise UnknownNameError(unknown("method", name, ["plain", *METHODS]))
    missing = METHODS[name].needs - sources_at_hand(sources)
    if missing:
        given = " and ".join(_GIVEN[what] for what in sorted(missing))
        raise InputError(
            f"{name} got no {', '.join(sorted(missing))}; expected one. Give it with {given}."
        )
    return METHODS[name].build(sources)


def drafts_with_model(drafter: str | Sequence[str] | None) -> bool:
    """Tell whether one of the methods takes the draft model itself, so that the engine must not."""
    names = [drafter] if isinstance(drafter, str) else list(drafter or ())
    return not {"rasd", "model", "fused"}.isdisjoint(names)


def compose(drafter: str | Sequence[str] | None, sources: Sources, model: Any = None) -> Any:
    """Return what an engine takes as a drafter, with the stores in the methods that use them.

    drafter: a name or the folder of a feature head, several (fused), or None for plain decoding.
    model: the target, which a head goes on from. A draft model is the engine's own business, but
    for those of `drafts_with_model`. Raises as `build_method` and `HeadDrafter` do, and InputError
    where stores are given that no method uses.
    """
    from ragspec.drafters.eagle.drafter import HeadDrafter

    if drafter is None:
        if sources.corpus or sources.history:
            raise InputError("got a store and --drafter none; expected one: leave the other out.")
        return None
    names = [drafter] if isinstance(drafter, str) else list(drafter)
    for name in names:
        if name not in METHODS and not Path(name).is_dir():
            known = ["none", *METHODS] if len(names) == 1 else METHODS
            raise UnknownNameError(unknown("drafter", name, known))
    if (sources.corpus or sources.history) and not STORED & set(names):
        raise InputError(
            f"got a store, but {', '.join(names)} does not draft from stores; expected one of "
            f"{', '.join(sorted(STORED))}. Use --drafter auto."
        )
    built: list[Drafter] = []
    for name in names:
        # A draft model is no method here, but one more source of the engine.
        made = build_method(name, sources) if name in METHODS else HeadDrafter(name, model)
        built.extend(made if isinstance(made, list) else [made])  # type: ignore[list-item]
    return built[0] if len(built) == 1 else built


def sources_at_hand(sources: Sources) -> set[str]:
    """Return the names of the sources that are there, as `Method.needs` calls them."""
    found = set()
    if sources.corpus is not None or sources.history is not None:
        found.add("store")
    if sources.draft_model is not None:
        found.add("draft model")
    return found


def open_sources(
    corpus: Path | None,
    history: Path | None = None,
    *,
    tokenizer: Any = None,
    model: Any = None,
    draft_model: Any = None,
    scope: str = GLOBAL,
) -> Sources:
    """Open the stores by path; raises StoreError where one is missing, damaged or foreign.

    tokenizer, model: what the stores must fit. scope: see `Sources`. Raises InputError for one that
    no store keeps, and for one where there is no store.
    """
    from ragspec.retrievers.corpus.index import CorpusIndex, checked_scope

    if checked_scope(scope) != GLOBAL and corpus is None and history is None:
        raise InputError(f"got scope {scope!r} and no store; expected --store or --history too.")

    def opened(path: Path | None) -> CorpusIndex | None:
        return None if path is None else CorpusIndex.open(path, tokenizer=tokenizer, model=model)

    return Sources(opened(corpus), opened(history), draft_model, scope)
