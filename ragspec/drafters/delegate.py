"""Delegation: drafters inside another drafter, whose faults never reach the text.

Each one has its own fusion (see `fuse`), which checks its trees, counts its faults, late drafts
included, and switches it off after the third. A session may have two optional members for
combined drafters:
- `matched`: length of the suffix that its last proposal continues (0 = none), for selection;
- `distributions()`: distributions at the expanded nodes of the last proposal, see
`KnowsDistributions`.
"""

from __future__ import annotations

from collections import Counter
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
    """A draft session that returns the distributions at some nodes of its last tree."""

    def distributions(self) -> Iterable[KnownDistribution]:
        """Return the distributions at the root and at the nodes that were expanded."""


class Wrapped:
    """A session that passes all feedback to another one, `inner`, but proposes other trees."""

    def __init__(self, inner: DraftSession) -> None:
        # It observes a prefill only if the wrapping drafter declares that the inner one reads it.
        self.inner = cast(LearningSession, inner)

    def observe(self, feedback: Feedback) -> None:
        """Pass the step or the prefill to the inner session."""
        self.inner.observe(feedback)


class SourceSession:
    """One drafter inside a row of another drafter.

    It removes the adviser from the context, because the outer fusion corrects the claims.

    Args:
        patience: Time limit in seconds for one draft of a look-up, see `FuseSession`.
    """

    def __init__(
        self, drafter: Drafter, request: DraftRequest, patience: float | None = PATIENCE
    ) -> None:
        self.name = drafter.name
        self._guard = FuseSession([drafter], request, checked_patience(patience))
        self._session = self._guard.alone

    @property
    def faults(self) -> dict[str, int]:
        """The fault count by source; empty without faults."""
        return self._guard.faults

    @property
    def matched(self) -> int | None:
        """Length of the match behind the last proposal; None if the session does not have it."""
        matched: int | None = getattr(self._session, "matched", None)
        return matched

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree; the empty one if it failed."""
        if context.adviser is not None:
            context = replace(context, adviser=None)
        return self._guard.propose(context, budget)

    def observe(self, feedback: Feedback) -> None:
        """Pass the step, or the parts of the prefill that it reads, to the drafter."""
        self._guard.observe(feedback)


def faults_of(sources: Iterable[SourceSession]) -> dict[str, int]:
    """Return the summed faults of all sources by name."""
    total: Counter[str] = Counter()
    for source in sources:
        total.update(source.faults)
    return dict(total)


def as_kind(tree: DraftTree, kind: DraftKind) -> DraftTree:
    """Return the tree with another kind and without q, for judging by equality (`walk`)."""
    if tree.kind is kind:
        return tree
    # Only a sampled tree may repeat siblings.
    plain = merge([tree]) if tree.kind is DraftKind.SAMPLED else tree
    return replace(plain, kind=kind, q=None)
