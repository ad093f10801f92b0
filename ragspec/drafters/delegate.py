"""Delegation: drafters inside another drafter, whose faults never reach the text.

Each one has its own fusion (see `fuse`), which checks its trees, counts its faults, late drafts
included, and switches it off after the third.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Prefill
from ragspec.drafters.fuse import PATIENCE, FuseSession, checked_patience
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import merge


class SourceSession(FuseSession):
    """One drafter inside a row of another drafter.

    It removes the adviser from the context, because the outer fusion corrects the claims.

    Args:
        patience: Time limit in seconds for one draft of a look-up, see `FuseSession`.
    """

    def __init__(
        self, drafter: Drafter, request: DraftRequest, patience: float | None = PATIENCE
    ) -> None:
        super().__init__([drafter], request, checked_patience(patience))
        self.name = drafter.name
        self._session = self._sources[0].session

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree; the empty one if it failed."""
        if context.adviser is not None:
            context = replace(context, adviser=None)
        tree = super().propose(context, budget)
        self.matched = None if self._session is None else self._session.matched
        return tree


class SourcesSession(DraftSession):
    """The part that sessions over several sources share."""

    def __init__(self, sources: Iterable[SourceSession]) -> None:
        self._sources = list(sources)

    @property
    def faults(self) -> dict[str, int]:
        """The summed faults of all sources by name; empty without faults."""
        total: Counter[str] = Counter()
        for source in self._sources:
            total.update(source.faults)
        return dict(total)

    def observe(self, step: Step) -> None:
        """Pass the step to every source, also to those that did not draft.

        `Step.tree` is the tree that was verified.
        """
        for source in self._sources:
            source.observe(step)

    def observe_prefill(self, prefill: Prefill) -> None:
        """Pass the prefill to every source."""
        for source in self._sources:
            source.observe_prefill(prefill)


def as_kind(tree: DraftTree, kind: DraftKind) -> DraftTree:
    """Return the tree with another kind and without q, for judging by equality (`walk`)."""
    if tree.kind is kind:
        return tree
    # Only a sampled tree may repeat siblings.
    plain = merge([tree]) if tree.kind is DraftKind.SAMPLED else tree
    return replace(plain, kind=kind, q=None)
