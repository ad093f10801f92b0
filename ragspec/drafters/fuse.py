"""Fusion: one tree from several drafters, whose nodes are ranked by `accept_prob`.

As in RASD (arXiv 2503.03434) the trees are merged by shared prefixes. Deviations: no source has a
quota; each may fill the whole budget, and the nodes of largest `accept_prob` are kept. No node is
pruned by a draft model's distribution. A failing source never breaks the text: it is switched off.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
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
    """One drafter in a row.

    Attributes:
        suffix: Distinguishes it, and the sources in its trees, from others of the same name.
        session: None once the source is switched off.
        look: The session's `expected_acceptance`, if it has one.
        patience: Time limit of a draft in seconds.
        learns: Whether it spends time on the target's best tokens of every step.
        reads_prompt, hidden: Whether it reads best tokens and hidden states of the prompt.
    """

    name: str
    kind: DraftKind
    suffix: str = ""
    session: DraftSession | None = None
    look: Callable[[DraftContext], float | None] | None = None
    faults: int = 0
    patience: float = inf
    warm: bool = False
    learns: bool = False
    reads_prompt: bool = False
    hidden: bool = False

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
            return None if self.look is None else self.look(context)
        except Exception as error:
            _fault(self, error)
            return None


class FuseSession:
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
            source = _Source(drafter.name + suffix, drafter.kind, suffix)
            self._sources.append(source)
            try:
                source.session = drafter.open(request)
                if source.session is None:
                    raise InputError(
                        "open returned None; expected a session that proposes and observes."
                    )
                source.look = getattr(source.session, "expected_acceptance", None)
            except Exception as error:
                source.faults = 1
                _switch_off(source, error)
            if patience is not None and _looks_up(drafter, source.session):
                source.patience = patience
            source.learns = source is not self._sources[0] and top_logits_needed([drafter]) > 0
            source.reads_prompt = reads_prompts([drafter])
            source.hidden = needs_hidden([drafter])
        self._adviser: Adviser | None = None

    @property
    def faults(self) -> dict[str, int]:
        """The fault count of each source that failed, inner sources included."""
        record = {source.name: source.faults for source in self._sources if source.faults}
        for source in self._sources:
            record |= getattr(source.session, "faults", {})
        return record

    @property
    def alone(self) -> DraftSession | None:
        """The session of the only source; None with several sources, or once it is off."""
        return self._sources[0].session if len(self._sources) == 1 else None

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return at most `budget` proposed nodes, those of largest `accept_prob`.

        An adviser in the context corrects the claims of each source. It skips costly sources that
        do not pay, and all sources if the expected acceptance is too low.
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
        # The declared kind, even if only some of the sources proposed nodes.
        return replace(keep_best(fused, budget), kind=self._kind)

    def expected_acceptance(self, context: DraftContext) -> float | None:
        """Return the largest estimate of the sources; None if none has one."""
        expectations = [source.expected_acceptance(context) for source in self._sources]
        return max((each for each in expectations if each is not None), default=None)

    def observe(self, feedback: Feedback) -> None:
        """Pass a step, or the parts of a prefill that it reads, to every source.

        `Step.tree` is the fused tree as it was verified.
        """
        for source in self._sources:
            if source.session is None:
                continue
            timed = source.learns and not isinstance(feedback, Prefill)
            began = perf_counter() if timed else 0.0
            try:
                if isinstance(feedback, Prefill):
                    notify_prefill(source.session, feedback, source.reads_prompt, source.hidden)
                else:
                    source.session.observe(feedback)
            except Exception as error:
                _fault(source, error)
            if timed and self._adviser is not None:
                self._adviser.record_cost(source.name, 1000.0 * (perf_counter() - began))

    def _begin(self, adviser: Adviser) -> None:
        """Switch off, without a warning, the sources that cost more to train than they save."""
        self._adviser = adviser
        for source in self._sources:
            if source.learns and adviser.should_skip(source.name):
                source.session = source.look = None

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
    """Return the time limit of a draft unchanged.

    Raises:
        InputError: The limit is not above 0 s.
    """
    if patience is not None and patience <= 0:
        raise InputError(f"got a patience of {patience} s; expected more, or None for no limit.")
    return patience


def _looks_up(drafter: Drafter, session: DraftSession | None) -> bool:
    """Return whether a drafter only looks up text: it runs no model and contains no drafters."""
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
