"""The drafting methods by name, over the stores and models that a user names.

Each name stands for one drafter, or for several that the engine fuses. The file of each method
declares its sources and needs (see `drafters.method`).
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ragspec.drafters.base import Drafter
from ragspec.drafters.method import GLOBAL, Sources, listed
from ragspec.errors import InputError
from ragspec.pipelines.console import checks
from ragspec.types import PreTrainedModel, Tokenizer

if TYPE_CHECKING:
    from ragspec.verification.causal import CausalTarget


def compose(
    drafter: str | Sequence[str] | None, sources: Sources, target: "CausalTarget | None" = None
) -> list[Drafter]:
    """Return drafters over the sources that they use, for an engine to fuse.

    A draft model that no method uses drafts beside them.

    Args:
        drafter: A method, the folder of a draft head, several; None or "none" for plain decoding.
        target: For draft heads and its table of next tokens.

    Raises:
        InputError: No method uses the store, or one lacks a source; also those of `HeadDrafter`.
        UnknownNameError, MissingModelError: There is no such method or folder.
    """
    from ragspec.drafters.build import build_all
    from ragspec.drafters.heads.drafter import HeadDrafter

    names = [drafter] if isinstance(drafter, str) else list(drafter or ())
    methods = listed()
    checks.check_drafters(names)
    names = [name for name in names if name != "none"]
    if sources.corpus or sources.history:
        checks.check_stored(names, {n for n, m in methods.items() if "store" in m.needs | m.uses})
    if target is not None:
        sources = replace(sources, table=target.next_tokens)
    return build_all([n if n in methods else HeadDrafter(n, target) for n in names], sources)


def open_sources(
    corpus: Path | None,
    history: Path | None = None,
    *,
    tokenizer: "Tokenizer | None" = None,
    model: "PreTrainedModel | None" = None,
    scope: str = GLOBAL,
) -> Sources:
    """Open stores that fit a tokenizer and a model; raise an error for others, or a lone scope."""
    if corpus is None and history is None:
        if scope != GLOBAL:
            raise InputError(f"got scope {scope!r} and no store; expected one.")
        return Sources(scope=scope)  # saves the second that the import takes
    from ragspec.retrievers.corpus.index import CorpusIndex

    stores = [
        None if path is None else CorpusIndex.open(path, tokenizer=tokenizer, model=model)
        for path in (corpus, history)
    ]
    return Sources(stores[0], stores[1], scope=scope)


def method_rows() -> list[tuple[str, ...]]:
    """Return name, source of drafts, paper and needs of each drafting method."""
    return [
        (name, method.drafts_from, method.paper, ", ".join(sorted(method.needs)))
        for name, method in listed().items()
    ]
