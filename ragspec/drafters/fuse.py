"""Fuse: one tree from several drafters, ranked in one currency, the reach.

As in RASD (arXiv 2503.03434) the trees are merged by shared prefixes. Deviations: no source has a
quota, every one may fill the whole budget and the nodes of largest reach are kept; nothing is
pruned by a draft model's distribution. A source that fails never breaks the text: it is switched
off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from ragspec.budget.base import Adviser
from ragspec.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    DraftSession,
    Feedback,
    Prefill,
    expect_drafter,
    needs_hidden,
    notify_prefill,
    reads_prompts,
    top_logits_needed,
)
from ragspec.drafters.combined import Combined, kind_of
from ragspec.errors import InputError
from ragspec.trees.draft_tree import DraftKind, DraftTree
from ragspec.trees.operations import check, keep_best, merge

FAULTS_ALLOWED = 3
PATIENCE = 0.5  # seconds that a look-up may take for one draft
WARM_UP = 20.0  # times as long for its first one, which may open files or compile


class Fuse(Combined):
    """Drafts with several drafters at once; with one alone, its trees pass unchanged.

    drafters: in order of trust: where two offer the same node, the first is named as its source.
    A single drafter keeps its kind and its distribution q, so that any rule can judge it; several
    make a deterministic tree if all are deterministic, else a coupled one, which `walk` judges.
    Raises InputError where there is no drafter, or something else than one.
    """

    open_to_more = True  # whether an engine may join further sources with its own, as equals

    def __init__(self, drafters: Sequence[Drafter], name: str = "fuse") -> None:
        if not drafters:
            raise InputError("got no drafter to fuse; expected at least one.")
        for drafter in drafters:
            expect_drafter(drafter)
        self.name = name
        self._drafters = tuple(drafters)

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """The drafters that are fused."""
        return self._drafters

    @property
    def kind(self) -> DraftKind:
        """The kind of the fused tree."""
        return self.drafters[0].kind if len(self.drafters) == 1 else kind_of(self.drafters)

    def open(self, request: DraftRequest) -> FuseSession:
        """Return a session that holds one session of every drafter."""
        return FuseSession(self.drafters, request)


@dataclass(slots=True)
class _Source:
    """One drafter in a row; `session` is None once it is switched off.

    suffix: what tells it, and the sources that its trees name, from others of the same name.
    look: the session's outlook, where it has one. patience: seconds that a draft may take; None for
    as long as it likes. learns: it has to be taught what the target thinks at every step.
    reads_prompt, hidden: what its drafter asks to be told of the prompt.
    """

    name: str
    kind: DraftKind
    suffix: str = ""
    session: DraftSession | None = None
    look: Callable[[DraftContext], float | None] | None = None
    faults: int = 0
    patience: float | None = None
    warm: bool = False
    learns: bool = False
    reads_prompt: bool = False
    hidden: bool = False

    def delay(self, seconds: float) -> InputError | None:
        """Return what is wrong with a draft that took so long; None where nothing is."""
        warm, self.warm = self.warm, True
        if self.patience is None:
            return None
        most = self.patience * (1.0 if warm else WARM_UP)
        if seconds <= most:
            return None
        return InputError(
            f"took {seconds:.3g} s for one draft; expected at most {most:.3g} s. Leave it out, or "
            "make its look-ups faster."
        )

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return how likely its best draft is, before it drafts; None where it cannot tell."""
        try:
            return None if self.look is None else self.look(context)
        except Exception as error:
            _fault(self, error)
            return None


class FuseSession:
    """The sources of one row. `faults` counts, by name, what went wrong.

    patience: seconds that a look-up may take for one draft, None for no limit; what takes longer is
    a fault, though its tree is used. Models take the time that they take, and drafters that hold
    others watch those.
    """

    def __init__(
        self, drafters: Sequence[Drafter], request: DraftRequest, patience: float | None = PATIENCE
    ) -> None:
        self._vocab_size = request.vocab_size
        # Retrieval speaks first: what it promises tells whether a model is worth asking.
        drafters = sorted(drafters, key=lambda each: each.kind is not DraftKind.DETERMINISTIC)
        self._kind = kind_of(drafters)
        names = [drafter.name for drafter in drafters]
        self._sources = []
        for number, drafter in enumerate(drafters):
            same = names[:number].count(drafter.name)
            # What is learned goes by name: two stores are not to answer for each other.
            suffix = f" {same + 1}" if same else ""
            self._sources.append(_Source(drafter.name + suffix, drafter.kind, suffix))
        for source, drafter in zip(self._sources, drafters, strict=True):
            try:
                source.session = _opened(drafter, request)
                source.look = getattr(source.session, "expected_acceptance", None)
            except Exception as error:
                source.faults = 1
                _switch_off(source, error)
            source.patience = patience if _looks_up(drafter, source.session) else None
            source.learns = source is not self._sources[0] and top_logits_needed([drafter]) > 0
            source.reads_prompt = reads_prompts([drafter])
            source.hidden = needs_hidden([drafter])
        self._adviser: Adviser | None = None

    @property
    def faults(self) -> dict[str, int]:
        """How often each source failed, those within others too; those without are left out."""
        record = {source.name: source.faults for source in self._sources if source.faults}
        for source in self._sources:
            record |= getattr(source.session, "faults", {})
        return record

    @property
    def alone(self) -> DraftSession | None:
        """The session of the only source; None where there are several, or it is off."""
        return self._sources[0].session if len(self._sources) == 1 else None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return the at most `budget` nodes of largest reach that the sources propose.

        With an adviser in the context, claims are corrected source by source, costly sources are
        asked only where they pay, and none where the outlook is too poor.
        """
        adviser = context.adviser
        if adviser and self._adviser is None:
            self._begin(adviser)
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
                request = adviser.allowance(source.name, budget)
            tree = self._ask(source, context, request) if request else None
            if tree is not None and len(tree):
                parts.append((tree, number))
        fused = self._merged(parts)
        # The kind that was declared, also where only some of the sources spoke.
        return replace(keep_best(fused, budget), kind=self._kind)

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the best of the sources' outlooks; None where none can tell."""
        expectations = [source.expected_acceptance(context) for source in self._sources]
        return max((each for each in expectations if each is not None), default=None)

    def observe(self, feedback: Feedback) -> None:
        """Tell every source; `Step.tree` is the fused tree as it was verified."""
        if isinstance(feedback, Prefill):
            return self._notify_prefill(feedback)
        for source in self._sources:
            if source.session is None:
                continue
            began = perf_counter() if source.learns else 0.0
            try:
                source.session.observe(feedback)
            except Exception as error:
                _fault(source, error)
            if source.learns and self._adviser is not None:
                self._adviser.taught(source.name, 1000.0 * (perf_counter() - began))

    def _notify_prefill(self, prefill: Prefill) -> None:
        """Tell each source of the prompt what its own drafter asked for."""
        for source in self._sources:
            if source.session is None:
                continue
            try:
                notify_prefill(source.session, prefill, source.reads_prompt, source.hidden)
            except Exception as error:
                _fault(source, error)

    def _begin(self, adviser: Adviser) -> None:
        """Let the sources rest that are not worth their teaching: for this text, and silently."""
        self._adviser = adviser
        for source in self._sources:
            if source.learns and adviser.rests(source.name):
                source.session = source.look = None

    def _merged(self, parts: Sequence[tuple[DraftTree, int]]) -> DraftTree:
        """Return the trees, each with the number of its source, as one."""
        return merge(tree for tree, _ in parts)

    def _ask(self, source: _Source, context: DraftContext, budget: int) -> DraftTree | None:
        """Return the source's tree as it may be believed; None where it is off or has failed."""
        if source.session is None:
            return None
        request = context
        if context.adviser is not None and isinstance(source.session, FuseSession):
            request = replace(context, adviser=None)  # no claim is corrected twice
        began = perf_counter()
        try:
            tree = source.session.propose(request, budget)
            late = source.delay(perf_counter() - began)
            check(tree, self._vocab_size)
            if len(tree) and tree.kind is not source.kind:
                raise InputError(
                    f"drafter {source.name!r} proposed a {tree.kind.value!r} tree; it declares "
                    f"{source.kind.value!r}."
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
                tree = context.adviser.appraise(tree, context.tokens[-1])
            context.adviser.spent(source.name, 1000.0 * (perf_counter() - began))
        return tree


def checked_patience(patience: float | None) -> float | None:
    """Return the patience; raises InputError for one that no draft could meet."""
    if patience is not None and patience <= 0:
        raise InputError(f"got a patience of {patience} s; expected more, or None for no limit.")
    return patience


def _opened(drafter: Drafter, request: DraftRequest) -> DraftSession:
    session = drafter.open(request)
    if session is None:
        raise InputError("open returned None; expected a session that proposes and observes.")
    return session


def _looks_up(drafter: Drafter, session: DraftSession | None) -> bool:
    """Tell whether a drafter only looks things up: no model, and no others that it watches."""
    if drafter.kind is not DraftKind.DETERMINISTIC or needs_hidden([drafter]):
        return False
    return not hasattr(session, "distributions") and not hasattr(session, "faults")


def _fault(source: _Source, error: Exception) -> None:
    source.faults += 1
    if source.faults >= FAULTS_ALLOWED:
        _switch_off(source, error)


def _switch_off(source: _Source, error: Exception) -> None:
    source.session = source.look = None
    warnings.warn(
        f"drafter {source.name!r} is switched off for this text after {source.faults} fault(s); "
        f"under an exact rule the output is not affected. Last: {type(error).__name__}: {error}",
        RuntimeWarning,
        stacklevel=4,
    )
