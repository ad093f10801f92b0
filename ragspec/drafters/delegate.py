"""Sources: drafters held by another drafter, so that a fault of one never reaches the text.

Each goes through a fusion of its own (see `fuse`), which checks its trees, counts its faults, late
answers among them, and switches it off after the third. A session may tell more
than a tree, by optional members that combinators look for:
- `matched`: length of the suffix that its last proposal continues (0 = none), for selection;
- `distributions()`: what the last proposal knew at the nodes that were expanded, see
`KnowsDistributions`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

from ragspec.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    DraftSession,
    Feedback,
    LearningSession,
)
from ragspec.drafters.fuse import PATIENCE, FuseSession, checked_patience
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import merge

if TYPE_CHECKING:
    from ragspec.drafters.model.cache import KnownDistribution


@runtime_checkable
class KnowsDistributions(Protocol):
    """The optional part of a draft session: distributions at some nodes of its last tree."""

    def distributions(self) -> Iterable[KnownDistribution]:
        """Return the distributions at the root and at the nodes that were expanded."""


class Wrapped:
    """A session that hands on to another, `inner`, all that it learns; what it proposes differs."""

    def __init__(self, inner: DraftSession) -> None:
        # Told of the prompt only if its drafter asked, for which the wrapping one answers.
        self.inner = cast(LearningSession, inner)

    def observe(self, feedback: Feedback) -> None:
        """Hand on what came of the step, or what the target knew of the prompt."""
        self.inner.observe(feedback)


class SourceSession:
    """One drafter in one row of another that takes its trees as they are.

    patience: seconds that a look-up may take for one draft, see `FuseSession`. An adviser in the
    context is kept for whoever holds the other drafter, so that no claim is corrected twice.
    """

    def __init__(
        self, drafter: Drafter, request: DraftRequest, patience: float | None = PATIENCE
    ) -> None:
        self.name = drafter.name
        self._guard = FuseSession([drafter], request, checked_patience(patience))
        self._session = self._guard.alone

    @property
    def faults(self) -> dict[str, int]:
        """How often the drafter failed; empty where it did not."""
        return self._guard.faults

    @property
    def matched(self) -> int | None:
        """Length of the match behind the last proposal, None where the drafter does not tell."""
        result = getattr(self._session, "matched", None)
        return None if result is None else int(result)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree, the empty one where it failed."""
        if context.adviser is not None:
            context = replace(context, adviser=None)
        return self._guard.propose(context, budget)

    def observe(self, feedback: Feedback) -> None:
        """Hand on what came of the step, and of the prompt what the drafter asked for."""
        self._guard.observe(feedback)


def faults_of(sources: Iterable[SourceSession]) -> dict[str, int]:
    """Return the faults of all sources by name."""
    total: dict[str, int] = {}
    for source in sources:
        for name, count in source.faults.items():
            total[name] = total.get(name, 0) + count
    return total


def as_kind(tree: DraftTree, kind: DraftKind) -> DraftTree:
    """Return the tree as one of a drafter of that kind, to be judged by equality (`walk`)."""
    if tree.kind is kind:
        return tree
    # A sampled tree may repeat siblings, which no other kind may.
    plain = merge([tree]) if tree.kind is DraftKind.SAMPLED else tree
    return replace(plain, kind=kind, q=None)
