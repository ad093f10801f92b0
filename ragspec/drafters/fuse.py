"""Drafters that contain others, and fusion: one tree from several, ranked by `accept_prob`.

As in RASD (arXiv 2503.03434) the trees are merged by shared prefixes. Deviations: no source has a
quota; each may fill the whole budget, and the nodes of largest `accept_prob` are kept. No node is
pruned by a draft model's distribution. A failing source never breaks the text: it is switched off.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from math import inf
from time import perf_counter
from typing import TYPE_CHECKING, TypeVar

from ragspec.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    DraftSession,
    Prefill,
    expect_drafter,
)
from ragspec.errors import InputError
from ragspec.needs import Capabilities, Needs, match
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, keep_best, keep_path, merge

if TYPE_CHECKING:
    from ragspec.sampling.transform import Transform

T = TypeVar("T")
FAULTS_ALLOWED = 3
PATIENCE = 0.5  # time limit of a look-up for one draft, in seconds
WARM_UP = 20.0  # factor on the limit of the first draft, which may open files or compile


class Combined(Drafter):
    """A drafter that contains others, from which its kind and its needs follow.

    Its trees are deterministic if those of all drafters are, else coupled.

    Args:
        needs: Its own needs beside theirs.

    Raises:
        InputError: A drafter is none.
    """

    looks_up = False

    def __init__(self, name: str, drafters: Sequence[Drafter], needs: Needs | None = None) -> None:
        self.name, self.drafters = name, tuple(map(expect_drafter, drafters))
        plain = all(drafter.kind is DraftKind.DETERMINISTIC for drafter in drafters)
        self.kind = DraftKind.DETERMINISTIC if plain else DraftKind.COUPLED
        self.needs = Needs.union([needs or Needs(), *(drafter.needs for drafter in drafters)])


def within(drafter: Drafter) -> Iterator[Drafter]:
    """Yield a drafter and all drafters that it contains."""
    yield drafter
    for inner in drafter.drafters:
        yield from within(inner)


def match_drafter(drafter: Drafter, offered: Capabilities, name: str | None = None) -> None:
    """Raise an error unless a target meets the needs of a drafter, see `match`.

    The message names the innermost drafter that has the need, else `name`, by default its own.
    """
    lacking = [each.name for each in within(drafter) if offered.lacking(each.needs)]
    name = lacking[-1] if lacking else name or drafter.name
    match(f"drafter {name!r}", drafter.needs, offered, drafter.kind)


def required_transform(drafter: Drafter | None) -> "Transform | None":
    """Return the transform that a drafter, or one that it contains, requires; None without any.

    Raises:
        InputError: Several drafters require one.
    """
    parts = () if drafter is None else within(drafter)
    transforms = [each.transform for each in parts if each.transform is not None]
    if len(transforms) > 1:
        names = ", ".join(repr(each.name) for each in transforms)
        raise InputError(f"got drafters that each bring a transform ({names}); expected one.")
    return transforms[0] if transforms else None


class Fuse(Combined):
    """Drafts with several drafters at once.

    A single drafter keeps its trees, its kind and its distribution q, so any rule can judge them.
    Several make a deterministic tree if all are deterministic, else a coupled one, which `walk`
    judges.

    Args:
        drafters: In order of trust. If two propose the same node, its source is the first one.
            Deterministic ones draft first: their `accept_prob` decides whether a model drafts.

    Raises:
        InputError: There is no drafter, or an object that is none.
    """

    open_to_more = True  # whether an engine may add its own sources to these

    def __init__(self, drafters: Sequence[Drafter], name: str = "fuse") -> None:
        if not drafters:
            raise InputError("got no drafter to fuse; expected at least one.")
        super().__init__(name, drafters)
        self.drafters = tuple(sorted(drafters, key=lambda d: d.kind is not DraftKind.DETERMINISTIC))
        if len(drafters) == 1:
            self.kind = drafters[0].kind

    def open(self, request: DraftRequest) -> "FuseSession":
        """Return a session that holds one session of every drafter."""
        return FuseSession(self, request)


class Source:
    """One drafter inside another one or a fusion, whose faults never reach the text.

    It checks the trees, counts faults, and switches the drafter off after the third. A look-up
    slower than `PATIENCE` is a fault, but its tree is used. Models have no limit, and drafters that
    contain others apply it to each.

    Args:
        suffix: Distinguishes it, and the sources in its trees, from others of the same name.

    Attributes:
        session: None once the drafter is switched off.
        matched: That of the session after its last proposal, see `DraftSession`.
    """

    def __init__(self, drafter: Drafter, request: DraftRequest, suffix: str = "") -> None:
        self.drafter, self.name = drafter, drafter.name + suffix
        self.session: DraftSession | None = None
        self.matched: int | None = None
        self.count = 0
        runs_model = drafter.needs.hidden_states or drafter.kind is not DraftKind.DETERMINISTIC
        self._patience = PATIENCE if drafter.looks_up and not runs_model else inf
        self._limit = WARM_UP * self._patience  # of the next draft
        self._suffix, self._vocab_size = suffix, request.vocab_size
        try:
            session = drafter.open(request)
            if not isinstance(session, DraftSession):
                raise InputError(f"open returned {type(session).__name__}; expected DraftSession.")
            self.session = session
        except Exception as error:
            self.count = 1
            self._switch_off(error)

    @property
    def faults(self) -> dict[str, int]:
        """The fault counts of the drafter and of those that it contains; empty without faults."""
        counts = {self.name: self.count} if self.count else {}
        return counts if self.session is None else counts | self.session.faults

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the drafter's tree of at most `budget` nodes; the empty one if it failed.

        An adviser in the context corrects its claims.
        """
        self.matched, adviser = None, context.adviser
        if self.session is None:
            return DraftTree.empty()
        if adviser is not None and isinstance(self.session, SourcesSession):
            context = replace(context, adviser=None)  # or claims would be corrected twice
        began = perf_counter()
        try:
            tree = self.session.propose(context, budget)
            self.matched = self.session.matched
            seconds, most, self._limit = perf_counter() - began, self._limit, self._patience
            check(tree, self._vocab_size)
            if len(tree) and tree.kind is not self.drafter.kind:
                raise InputError(
                    f"drafter {self.name!r} declares {self.drafter.kind}; it proposed {tree.kind}."
                )
        except Exception as error:
            self.fault(error)
            return DraftTree.empty()
        if seconds > most:
            late = f"took {seconds:.3g} s for one draft; expected at most {most:.3g} s."
            self.fault(InputError(f"{late} Leave it out, or make its look-ups faster."))
        if self._suffix and len(tree):
            tree = replace(tree, sources=tuple(name + self._suffix for name in tree.sources))
        if adviser is not None:
            if len(tree):
                tree = adviser.appraise(tree)
            adviser.spent(self.name, 1000.0 * (perf_counter() - began))
        return keep_best(tree, budget) if len(tree) else DraftTree.empty()

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the drafter's estimate of its next draft; None if it has none or fails."""
        return self._safely(lambda session: session.expected_acceptance(context))

    def observe(self, step: Step) -> None:
        """Pass the step to the drafter."""
        self._safely(lambda session: session.observe(step))

    def observe_prefill(self, prefill: Prefill) -> None:
        """Pass the part of the prefill that the drafter needs."""
        part = prefill.restricted(self.drafter.needs)
        if part is not None:
            self._safely(lambda session: session.observe_prefill(part))

    def _safely(self, act: Callable[[DraftSession], T]) -> T | None:
        """Return what a call of the session does; None if there is none, or it failed."""
        try:
            return None if self.session is None else act(self.session)
        except Exception as error:
            self.fault(error)
            return None

    def fault(self, error: Exception) -> None:
        """Count a fault; switch the drafter off if there were too many."""
        self.count += 1
        if self.count >= FAULTS_ALLOWED:
            self._switch_off(error)

    def _switch_off(self, error: Exception) -> None:
        self.session = None
        warnings.warn(
            f"drafter {self.name!r} is switched off for this text (faults: {self.count}); "
            f"under an exact rule the output is the same. Last: {type(error).__name__}: {error}",
            RuntimeWarning,
            stacklevel=4,
        )


class SourcesSession(DraftSession):
    """A session over the sources of one row, which all learn from every step."""

    def __init__(self, drafter: Combined, request: DraftRequest) -> None:
        names = [each.name for each in drafter.drafters]
        # Statistics are kept by name: two stores must not share them.
        same = [names[:number].count(name) for number, name in enumerate(names)]
        self._sources = [
            Source(each, request, f" {count + 1}" if count else "")
            for each, count in zip(drafter.drafters, same, strict=True)
        ]
        self._drafter, self._chains = drafter, request.chains

    @property
    def faults(self) -> dict[str, int]:
        """The summed faults of all sources by name; empty without faults."""
        return dict(sum((Counter(source.faults) for source in self._sources), Counter()))

    def observe(self, step: Step) -> None:
        """Pass the step to every source, also to those that did not draft.

        `Step.tree` is the tree that was verified.
        """
        for source in self._sources:
            source.observe(step)

    def observe_prefill(self, prefill: Prefill) -> None:
        """Pass every source the part of the prefill that it needs."""
        for source in self._sources:
            source.observe_prefill(prefill)


class FuseSession(SourcesSession):
    """The drafters of one row; see `Fuse`."""

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` proposed nodes, those of largest `accept_prob`.

        An adviser in the context corrects the claims of each source. It skips costly sources that
        do not pay, and all sources if the expected acceptance is too low.
        """
        adviser = context.adviser
        if adviser and not (budget := adviser.nodes(self.expected_acceptance(context), budget)):
            return DraftTree.empty(self._drafter.kind)
        if len(self._sources) == 1:
            return self._sources[0].propose(context, budget)
        parts: dict[Source, DraftTree] = {}
        for number, source in enumerate(self._sources):
            request = budget
            if adviser and number > 0 and source.session is not None:
                request = adviser.share(source.name, budget)
            if request and len(tree := source.propose(context, request)):
                parts[source] = tree
        # The declared kind, even if only some of the sources proposed nodes.
        return as_kind(keep_best(self._merged(parts), budget), self._drafter.kind)

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the largest estimate of the sources; None if none has one."""
        expectations = [source.expected_acceptance(context) for source in self._sources]
        return max((each for each in expectations if each is not None), default=None)

    def _merged(self, parts: dict[Source, DraftTree]) -> DraftTree:
        """Return the trees of some sources as one, or the best path of any of them."""
        if not self._chains or not parts:
            return merge(parts.values())
        return max(map(keep_path, parts.values()), key=lambda path: float(path.accept_prob.sum()))


def as_kind(tree: DraftTree, kind: DraftKind) -> DraftTree:
    """Return the tree with another kind and without q, for judging by equality (`walk`)."""
    if tree.kind is kind:
        return tree
    # Only a sampled tree may repeat siblings.
    return replace(merge([tree]) if tree.kind is DraftKind.SAMPLED else tree, kind=kind, q=None)
