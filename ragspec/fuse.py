"""Fuse: one tree from several drafters, ranked in one currency, the reach.

As in RASD (arXiv 2503.03434) the trees are merged by shared prefixes. Deviations: no source has a
quota, every one may fill the whole budget and the nodes of largest reach are kept; nothing is
pruned by a draft model's law. A source that fails never breaks the text: it is switched off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ragspec.draft import (
    DraftContext,
    Drafter,
    DraftKind,
    DraftRequest,
    DraftSession,
    DraftTree,
    Step,
)
from ragspec.errors import InputError
from ragspec.tree import check, keep_best, merge

FAULTS_ALLOWED = 3


class Fuse:
    """Drafts with several drafters at once; with one alone, its trees pass unchanged.

    drafters: in order of trust: where two offer the same node, the first is named as its source.
    A single drafter keeps its kind and its law q, so that any rule can judge it; several make a
    deterministic tree if all are deterministic, else a coupled one, which `walk` judges.
    Raises InputError where there is no drafter.
    """

    def __init__(self, drafters: Sequence[Drafter], name: str = "fuse") -> None:
        if not drafters:
            raise InputError("got no drafter to fuse; expected at least one.")
        self.name = name
        self.drafters = tuple(drafters)

    @property
    def kind(self) -> DraftKind:
        """The kind of the fused tree."""
        if len(self.drafters) == 1:
            return self.drafters[0].kind
        plain = all(drafter.kind is DraftKind.DETERMINISTIC for drafter in self.drafters)
        return DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED

    def open(self, request: DraftRequest) -> FuseSession:
        """Return a session that holds one session of every drafter."""
        return FuseSession(self.drafters, request)


@dataclass(slots=True)
class _Source:
    """One drafter in a row; `session` is None once it is switched off."""

    name: str
    kind: DraftKind
    session: DraftSession | None = None
    faults: int = 0


class FuseSession:
    """The sources of one row. `faults` counts, by name, what went wrong."""

    def __init__(self, drafters: Sequence[Drafter], request: DraftRequest) -> None:
        self._vocab_size = request.vocab_size
        self._sources = [_Source(drafter.name, drafter.kind) for drafter in drafters]
        for source, drafter in zip(self._sources, drafters, strict=True):
            try:
                source.session = drafter.open(request)
            except Exception as error:
                source.faults = 1
                _switch_off(source, error)

    @property
    def faults(self) -> dict[str, int]:
        """How often each source failed; sources without a fault are left out."""
        return {source.name: source.faults for source in self._sources if source.faults}

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` nodes of largest reach that any source proposes."""
        trees = []
        for source in self._sources:
            tree = self._ask(source, context, budget)
            if tree is not None and len(tree):
                trees.append(tree)
        if not trees:
            return DraftTree.empty()
        fused = trees[0] if len(self._sources) == 1 else merge(trees)
        return keep_best(fused, budget)

    def observe(self, step: Step) -> None:
        """Tell every source; `step.tree` is the fused tree as it was verified."""
        self._tell(lambda session: session.observe(step))

    def rollback(self, n: int) -> None:
        """Forget the last `n` committed tokens in every source."""
        self._tell(lambda session: session.rollback(n))

    def _ask(self, source: _Source, context: DraftContext, budget: int) -> DraftTree | None:
        """Return the source's tree, or None where it is off or has just failed."""
        if source.session is None:
            return None
        try:
            tree = source.session.propose(context, budget)
            check(tree, self._vocab_size)
            if len(tree) and tree.kind is not source.kind:
                raise InputError(
                    f"drafter {source.name!r} proposed a {tree.kind.value!r} tree; it declares "
                    f"{source.kind.value!r}."
                )
        except Exception as error:
            _fault(source, error)
            return None
        return tree

    def _tell(self, what: Callable[[DraftSession], None]) -> None:
        for source in self._sources:
            if source.session is None:
                continue
            try:
                what(source.session)
            except Exception as error:
                _fault(source, error)


def _fault(source: _Source, error: Exception) -> None:
    source.faults += 1
    if source.faults >= FAULTS_ALLOWED:
        _switch_off(source, error)


def _switch_off(source: _Source, error: Exception) -> None:
    source.session = None
    warnings.warn(
        f"drafter {source.name!r} is switched off for this text after {source.faults} fault(s); "
        f"the output is not affected. Last: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=4,
    )
