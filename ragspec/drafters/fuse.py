"""Fusion: one tree from several drafters, whose nodes are ranked by `accept_prob`.

As in RASD (arXiv 2503.03434) the trees are merged by shared prefixes. Deviations: no source has a
quota; each may fill the whole budget, and the nodes of largest `accept_prob` are kept. No node is
pruned by a draft model's distribution. A failing source never breaks the text: it is switched off.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, Prefill
from ragspec.drafters.combined import Combined, kind_of
from ragspec.errors import InputError
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, keep_best, merge

FAULTS_ALLOWED = 3
PATIENCE = 0.5  # time limit of a look-up for one draft, in seconds
WARM_UP = 20.0  # factor on the limit of the first draft, which may open files or compile


class Fuse(Combined):
    """Drafts with several drafters at once.

    A single drafter keeps its trees, its kind and its distribution q, so any rule can judge them.
    Several make a deterministic tree if all are deterministic, else a coupled one, which `walk`
    judges.

    Args:
        drafters: In order of trust. If two propose the same node, its source is the first one.

    Raises:
        InputError: There is no drafter, or an object that is none.
    """

    open_to_more = True  # whether an engine may add its own sources to these

    def __init__(self, drafters: Sequence[Drafter], name: str = "fuse") -> None:
        if not drafters:
            raise InputError("got no drafter to fuse; expected at least one.")
        super().__init__(name, drafters)
        if len(drafters) == 1:
            self.kind = drafters[0].kind

    def open(self, request: DraftRequest) -> FuseSession:
        """Return a session that holds one session of every drafter."""
        return FuseSession(self.drafters, request)


@dataclass(slots=True)
class _Source:
    """One drafter in a row.

    Attributes:
        suffix: Distinguishes it, and the sources in its trees, from others of the same name.
        session: None once the source is switched off.
        patience: Time limit of a draft in seconds.
    """

    drafter: Drafter
    name: str
    suffix: str = ""
    session: DraftSession | None = None
    faults: int = 0
    patience: float = inf
    warm: bool = False

    def delay(self, seconds: float) -> InputError | None:
        """Return the error for a draft that took longer than allowed, else None."""
        warm, self.warm = self.warm, True
        most = self.patience * (1.0 if warm else WARM_UP)
        if seconds <= most:
            return None
        return InputError(
            f"took {seconds:.3g} s for one draft; expected at most {most:.3g} s. Leave it out, or "
            "make its look-ups faster."
        )

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the session's estimate of its next draft; None if it has none or fails."""
        try:
            return None if self.session is None else self.session.expected_acceptance(context)
        except Exception as error:
            _fault(self, error)
            return None


class FuseSession(DraftSession):
    """The sources of one row.

    Args:
        patience: Time limit in seconds for one draft of a look-up; None for no limit. A slower
            draft counts as a fault, but its tree is used. Models have no limit, and drafters that
            contain others apply their own.
    """

    def __init__(
        self, drafters: Sequence[Drafter], request: DraftRequest, patience: float | None = PATIENCE
    ) -> None:
        self._vocab_size = request.vocab_size
        # Retrieval drafts first: its `accept_prob` decides whether a model drafts at all.
        drafters = sorted(drafters, key=lambda each: each.kind is not DraftKind.DETERMINISTIC)
        self._kind = kind_of(drafters)
        names = [drafter.name for drafter in drafters]
        self._sources: list[_Source] = []
        for number, drafter in enumerate(drafters):
            same = names[:number].count(drafter.name)
            # Statistics are kept by name: two stores must not share them.
            suffix = f" {same + 1}" if same else ""
            source = _Source(drafter, drafter.name + suffix, suffix)
            self._sources.append(source)
            try:
                session = drafter.open(request)
                if not isinstance(session, DraftSession):
                    raise InputError(
                        f"open returned {type(session).__name__}; expected a DraftSession."
                    )
                source.session = session
            except Exception as error:
                source.faults = 1
                _switch_off(source, error)
            runs_model = drafter.needs.hidden_states or drafter.kind is not DraftKind.DETERMINISTIC
            if patience is not None and drafter.looks_up and not runs_model:
                source.patience = patience

    @property
    def faults(self) -> dict[str, int]:
        """The fault count of each source that failed, inner sources included."""
        record = {source.name: source.faults for source in self._sources if source.faults}
        for source in self._sources:
            record |= {} if source.session is None else source.session.faults
        return record

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` proposed nodes, those of largest `accept_prob`.

        An adviser in the context corrects the claims of each source. It skips costly sources that
        do not pay, and all sources if the expected acceptance is too low.
        """
        adviser = context.adviser
        if adviser and not (budget := adviser.nodes(self.expected_acceptance(context), budget)):
            return DraftTree.empty(self._kind)
        if len(self._sources) == 1:
            tree = self._ask(self._sources[0], context, budget)
            if tree is None or not len(tree):
                return DraftTree.empty()
            return keep_best(tree, budget)
        parts: list[tuple[DraftTree, int]] = []
        for number, source in enumerate(self._sources):
            request = budget
            if adviser and number > 0 and source.session is not None:
                request = adviser.share(source.name, budget)
            tree = self._ask(source, context, request) if request else None
            if tree is not None and len(tree):
                parts.append((tree, number))
        fused = self._merged(parts)
        # The declared kind, even if only some of the sources proposed nodes.
        return replace(keep_best(fused, budget), kind=self._kind)

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the largest estimate of the sources; None if none has one."""
        expectations = [source.expected_acceptance(context) for source in self._sources]
        return max((each for each in expectations if each is not None), default=None)

    def observe(self, step: Step) -> None:
        """Pass the step to every source; `step.tree` is the fused tree as it was verified."""
        for source in self._sources:
            if source.session is None:
                continue
            try:
                source.session.observe(step)
            except Exception as error:
                _fault(source, error)

    def observe_prefill(self, prefill: Prefill) -> None:
        """Pass every source the part of the prefill that it needs."""
        for source in self._sources:
            part = prefill.restricted(source.drafter.needs)
            if source.session is not None and part is not None:
                try:
                    source.session.observe_prefill(part)
                except Exception as error:
                    _fault(source, error)

    def _merged(self, parts: Sequence[tuple[DraftTree, int]]) -> DraftTree:
        """Return one tree; `parts` are the trees, each with the number of its source."""
        return merge(tree for tree, _ in parts)

    def _ask(self, source: _Source, context: DraftContext, budget: int) -> DraftTree | None:
        """Return the source's tree with corrected claims; None if it is off or fails."""
        if source.session is None:
            return None
        request = context
        if context.adviser is not None and isinstance(source.session, FuseSession):
            request = replace(context, adviser=None)  # so that no claim is corrected twice
        began = perf_counter()
        try:
            tree = source.session.propose(request, budget)
            late = source.delay(perf_counter() - began)
            check(tree, self._vocab_size)
            if len(tree) and tree.kind is not source.drafter.kind:
                raise InputError(
                    f"drafter {source.name!r} proposed a {tree.kind.value!r} tree; it declares "
                    f"{source.drafter.kind.value!r}."
                )
        except Exception as error:
            _fault(source, error)
            return None
        if late is not None:
            _fault(source, late)
        if source.suffix and len(tree):
            tree = replace(tree, sources=tuple(name + source.suffix for name in tree.sources))
        if context.adviser is not None:
            if len(tree):
                tree = context.adviser.appraise(tree)
            context.adviser.spent(source.name, 1000.0 * (perf_counter() - began))
        return tree


def checked_patience(patience: float | None) -> float | None:
    """Return the time limit of a draft unchanged.

    Raises:
        InputError: The limit is not above 0 s.
    """
    if patience is not None and patience <= 0:
        raise InputError(f"got a patience of {patience} s; expected more, or None for no limit.")
    return patience


def _fault(source: _Source, error: Exception) -> None:
    source.faults += 1
    if source.faults >= FAULTS_ALLOWED:
        _switch_off(source, error)


def _switch_off(source: _Source, error: Exception) -> None:
    source.session = None
    warnings.warn(
        f"drafter {source.name!r} is switched off for this text after {source.faults} fault(s); "
        f"under an exact rule the output is not affected. Last: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=4,
    )
