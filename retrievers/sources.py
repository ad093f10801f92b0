"""Sources: drafters held by another drafter, so that a fault of one never reaches the text.

Each goes through `Fuse` of its own, which checks its trees, counts its faults and switches it off
after the third; an answer that comes too late counts as a fault as well. A session may tell more
than a tree, by optional members that combinators look for:
- `matched`: length of the suffix that its last proposal continues (0 = none), for selection;
- `laws()`: what the last proposal knew at the nodes that were expanded, see `KnowsLaws`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch

from ragspec.draft import (
    DraftContext,
    Drafter,
    DraftKind,
    DraftRequest,
    DraftSession,
    DraftTree,
    Ints,
    Step,
    expect_drafter,
)
from ragspec.errors import InputError
from ragspec.fuse import Fuse
from ragspec.retrievers.provenance import check_all
from ragspec.taps import needs_hidden, tell_hidden
from ragspec.tops import reads_prompts, tell_prompt, wanted
from ragspec.tree import merge

if TYPE_CHECKING:
    from ragspec.draft_cache import KnownLaw

PATIENCE = 0.25


@runtime_checkable
class KnowsLaws(Protocol):
    """The optional part of a draft session that knows the law at some nodes of its last tree."""

    def laws(self) -> Iterable[KnownLaw]:
        """Return the laws at the root and at the nodes that were expanded."""
        ...


class Timely:
    """A drafter whose proposals are faults where they come too late.

    patience: seconds that a proposal may take; None for as long as it likes.
    """

    def __init__(self, drafter: Drafter, patience: float | None = PATIENCE) -> None:
        if patience is not None and patience <= 0:
            raise InputError(f"got a patience of {patience} s; expected more, or None for no limit")
        expect_drafter(drafter)
        self.drafter = drafter
        self.name = drafter.name
        self.kind = drafter.kind
        self.top_logits = wanted([drafter])
        self.reads_prompt = reads_prompts([drafter])
        self.needs_hidden = needs_hidden([drafter])
        self.patience = patience

    def fits(self, model: Any = None, tokenizer: Any = None) -> None:
        """Raise StoreError where the drafter's store was made with another model or tokenizer."""
        check_all([self.drafter], model, tokenizer)

    def open(self, request: DraftRequest) -> TimelySession:
        """Return the drafter's session, watched."""
        return TimelySession(self.name, self.drafter.open(request), self.patience)


class Wrapped:
    """A session that hands on to another, `inner`, all that it learns; what it proposes differs."""

    def __init__(self, inner: DraftSession) -> None:
        self.inner = inner

    def observe(self, step: Step) -> None:
        """Hand on what came of the step."""
        self.inner.observe(step)

    def observe_prompt(self, tokens: Ints, top: Ints) -> None:
        """Hand on what the prefill knew, see `tops`."""
        tell_prompt(self.inner, tokens, top)

    def observe_hidden(self, tokens: Ints, hidden: torch.Tensor) -> None:
        """Hand on the prompt's hidden states, see `taps`."""
        tell_hidden(self.inner, tokens, hidden)

    def rollback(self, n: int) -> None:
        """Hand on that the last `n` committed tokens are forgotten."""
        self.inner.rollback(n)


class TimelySession(Wrapped):
    """A session of which a proposal that took too long is a fault; `inner` is the session."""

    def __init__(self, name: str, inner: DraftSession, patience: float | None) -> None:
        super().__init__(inner)
        self._name = name
        self._patience = patience

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the session's tree. Raises InputError where it took too long."""
        began = perf_counter()
        tree = self.inner.propose(context, budget)
        spent = perf_counter() - began
        if self._patience is not None and spent > self._patience:
            raise InputError(
                f"drafter {self._name!r} took {spent:.3g} s for one draft; expected at most "
                f"{self._patience} s. Raise `patience`, or leave it out."
            )
        return tree


class Source:
    """One drafter in one row of another that takes its trees as they are.

    patience: see `Timely`. An adviser in the context is kept for whoever holds the other drafter,
    so that no claim is corrected twice.
    """

    def __init__(
        self, drafter: Drafter, request: DraftRequest, patience: float | None = PATIENCE
    ) -> None:
        self.name = drafter.name
        opening = _Opening(drafter, patience)
        self._guard = Fuse([opening]).open(request)
        self._session = opening.session

    @property
    def faults(self) -> dict[str, int]:
        """How often the drafter failed; empty where it did not."""
        return self._guard.faults

    @property
    def matched(self) -> int | None:
        """Length of the match behind the last proposal, None where the drafter does not tell."""
        found = getattr(self._session, "matched", None)
        return None if found is None else int(found)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree, the empty one where it failed."""
        if context.adviser is not None:
            context = replace(context, adviser=None)
        return self._guard.propose(context, budget)

    def observe(self, step: Step) -> None:
        """Hand on what came of the step."""
        self._guard.observe(step)

    def observe_prompt(self, tokens: Ints, top: Ints) -> None:
        """Hand on what the prefill knew, see `tops`."""
        self._guard.observe_prompt(tokens, top)

    def observe_hidden(self, tokens: Ints, hidden: torch.Tensor) -> None:
        """Hand on the prompt's hidden states, see `taps`."""
        self._guard.observe_hidden(tokens, hidden)

    def rollback(self, n: int) -> None:
        """Hand on that the last `n` committed tokens are forgotten."""
        self._guard.rollback(n)


class _Opening(Timely):
    """A drafter that keeps hold of the session it opens."""

    session: DraftSession | None = None

    def open(self, request: DraftRequest) -> TimelySession:
        opened = super().open(request)
        self.session = opened.inner
        return opened


def faults_of(sources: Iterable[Source]) -> dict[str, int]:
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
