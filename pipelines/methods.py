"""The drafting methods by name, over the stores and models that a user named.

Each name stands for one drafter (or several, which the engine fuses), as a user would build it.
What a method drafts from and needs stands in its own file (see `drafters.method`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.drafters.base import Drafter
from ragspec.drafters.method import GLOBAL, Drafters, Sources, build, listed
from ragspec.errors import InputError, ModelNotFoundError, UnknownNameError
from ragspec.registry import unknown

if TYPE_CHECKING:
    from rich.table import Table

    from ragspec.retrievers.corpus.index import CorpusIndex


OPTION_OF_NEED = {"store": "--store or --history", "draft model": "--draft-model"}


def build_method(name: str, sources: Sources) -> Drafters | None:
    """Return fresh drafters for a name, None for "plain".

    Raises UnknownNameError for another name, InputError where a source is missing.
    """
    if name == "plain":
        return None
    known = listed()
    if name not in known:
        raise UnknownNameError(unknown("method", name, ["plain", *known]))
    missing = known[name].needs - sources.available()
    if missing:
        flags = " and ".join(OPTION_OF_NEED[what] for what in sorted(missing))
        raise InputError(
            f"{name} got no {', '.join(sorted(missing))}; expected one. Give it with {flags}."
        )
    return build(name, sources)


def drafts_with_model(drafter: str | Sequence[str] | None) -> bool:
    """Tell whether one of the methods takes the draft model itself, so that the engine must not."""
    names = [drafter] if isinstance(drafter, str) else list(drafter or ())
    known = listed()
    return any("draft model" in known[name].uses for name in names if name in known)


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
    known = listed()
    for name in names:
        if name not in known and not Path(name).is_dir():
            if Path(name).name != name:
                raise ModelNotFoundError(
                    f"got no head in {name}: there is no such folder; expected one that `ragspec "
                    "train-head` wrote, or a name that `ragspec drafters` lists."
                )
            others = ["none", *known] if len(names) == 1 else known
            raise UnknownNameError(unknown("drafter", name, others))
    stored = {name for name, method in known.items() if "store" in method.uses}
    if (sources.corpus or sources.history) and not stored & set(names):
        raise InputError(
            f"got a store, but {', '.join(names)} does not draft from stores; expected one of "
            f"{', '.join(sorted(stored))}. Use --drafter auto."
        )
    built: list[Drafter] = []
    for name in names:
        # A draft model is no method here, but one more source of the engine.
        instance = build_method(name, sources) if name in known else HeadDrafter(name, model)
        built.extend(instance if isinstance(instance, list) else [instance])  # type: ignore[list-item]
    return built[0] if len(built) == 1 else built


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
    if corpus is None and history is None and scope == GLOBAL:
        return Sources(None, None, draft_model, scope)  # without the second of importing stores
    from ragspec.retrievers.corpus.index import CorpusIndex, checked_scope

    if checked_scope(scope) != GLOBAL and corpus is None and history is None:
        raise InputError(f"got scope {scope!r} and no store; expected --store or --history too.")

    def opened(path: Path | None) -> CorpusIndex | None:
        return None if path is None else CorpusIndex.open(path, tokenizer=tokenizer, model=model)

    return Sources(opened(corpus), opened(history), draft_model, scope)


def method_table() -> Table:
    """Return what can be named as a drafter, what each drafts from, its paper and its needs."""
    from rich.table import Table

    table = Table("name", "drafts from", "method", "needs", box=None)
    for name, method in listed().items():
        table.add_row(name, method.drafts_from, method.paper, ", ".join(sorted(method.needs)))
    return table
