"""The one loop: draft, verify, judge, commit, emit.

It knows rows of token ids, a target session and a rule. It refuses to know text, documents,
pixels and what a drafter does to arrive at its tree. Rows join and leave between its steps; a call
of the engine is the case in which all join at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

from torch import Tensor

from ragspec.budget.cost_curve import SharedForward
from ragspec.budget.tree_size import fit_together
from ragspec.engine.reading import PrefillJob, hidden_of, portions, read
from ragspec.engine.rows import Row
from ragspec.engine.step import (
    Emission,
    InFlightStep,
    Launcher,
    StepOutput,
    emit,
    judge,
    learn,
    propose,
)
from ragspec.errors import UnsupportedModelError
from ragspec.models.device import out_of_memory, without_autograd
from ragspec.rules.base import Rule, Step, Verdict, open_rule
from ragspec.rules.target_view import RowView
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import CachedSession, TargetSession

P = ParamSpec("P")
T = TypeVar("T")


def decode(
    session: TargetSession,
    rows: Sequence[Row],
    prompts: Sequence[int],
    rule: Rule,
    forward: SharedForward | None = None,
) -> Iterator[list[Emission]]:
    """Yield what each pass emits until every row is done; abandon it to stop early.

    prompts: for each row the number of the prompt that it continues. Rows of one prompt follow
    each other; the first of them brings the prompt in `pending`, and they share its prefill.
    forward: what the policies of the rows look at.
    """
    loop = Loop(session, forward)
    for prompt in dict.fromkeys(prompts):
        loop.join(
            [row for row, current in zip(rows, prompts, strict=True) if current == prompt], rule
        )
    while loop.rows:
        yield loop.step()


class Loop:
    """Rows that join, take their steps together over one session, and leave.

    Where rows are kept apart and memory ends, the row with most left to do is put back: it gives
    its memory away, and its text is read again when another row has left. forward: what the
    policies of the rows look at, kept up to date. chunk: tokens of prompts that are read between
    two steps; None for all of them at once. apart: whether what a row raises ends that row alone,
    as `Row.error`; else it is raised.
    """

    def __init__(
        self,
        session: TargetSession,
        forward: SharedForward | None = None,
        *,
        chunk: int | None = None,
        difference: bool = False,
    ) -> None:
        self.session = session
        self._forward = SharedForward() if forward is None else forward
        self._chunk = chunk
        self._isolate_errors = difference
        self._jobs: list[PrefillJob] = []
        self._live: list[Row] = []
        self._put_back: list[PrefillJob] = []
        self._launcher = Launcher(session)
        self._ahead: InFlightStep | None = None  # the forward that was launched ahead,
        self._failure: Exception | None = None  # or why it could not be
        self._most = 0  # rows for which there was memory, where some were put back

    @property
    def room(self) -> bool:
        """Whether another row may join: there is memory for it, as far as is known."""
        return not self._put_back

    @property
    def rows(self) -> list[Row]:
        """The rows that have joined and not left."""
        return [*self._live, *(row for job in self._jobs for row in job.rows)]

    def join(self, rows: Sequence[Row], rule: Rule, scope: str = "") -> None:
        """Let the rows of one prompt join; its text is read in the steps to come.

        scope: only texts of the same one lend each other what was read of them. Raises
        UnsupportedModelError where a distribution needs hidden states that the session cannot keep.
        """
        for row in rows:
            row.rule, row.scope = open_rule(rule), scope
        if any(row.reads_hidden for row in rows):
            _keep_hidden(self.session, rows)
        if not rows[0].done:
            self._enter(list(rows), resumed=_resumed(rows[0]))

    def leave(self, row: Row) -> None:
        """Let a row leave, whether or not its text has ended."""
        if self._ahead is not None or self._failure is not None:
            self._withdraw()
        if row in self._live:
            self._live.remove(row)
        self._jobs = list(_without(row, self._jobs))
        self._put_back = list(_without(row, self._put_back))
        if row.slot is not None:
            self.session.leave(row.slot)
            row.slot = None

    def step(self) -> list[Emission]:
        """Take one step in every row that is read, then read on in those that are not.

        Returns what they emitted. Rows that have ended have left. Where the session can, the next
        forward is running by then.
        """
        while self._put_back and len(self.rows) < self._most:
            self._jobs.append(self._put_back.pop(0))
        advanced = self._advance() if self._live else []
        emissions = [*advanced, *(self._read() if self._jobs else [])]
        for row in [row for row in self.rows if row.done]:
            self.leave(row)
        if self._launcher.ahead and self._live:
            self._launch_ahead()
        for emission in advanced:
            emission.row.report.step(emission.step)
        return emissions

    @without_autograd
    def _launch_ahead(self) -> None:
        """Launch the next forward before the tokens of the last one are handed on.

        What goes wrong is raised by the next step: nobody loses what was written.
        """
        try:
            self._ahead = self._launch()
        except Exception as error:
            self.session.abandon()
            self._failure = error

    def _launch(self) -> InFlightStep | None:
        """Draft for every row and launch the forward; None where no row is left to verify."""
        began = time.perf_counter()
        rows, trees = self._drafts()
        if not rows:
            return None
        pending_step = InFlightStep(rows, trees, time.perf_counter() - began)
        self._launcher.launch(pending_step)
        return pending_step

    def _withdraw(self) -> None:
        """Forget the forward that was launched ahead: its rows are drafted for again."""
        self.session.abandon()
        self._ahead = self._failure = None

    def _enter(self, rows: list[Row], resumed: bool) -> None:
        """Let rows be read; one of which all but the root was read before takes steps at once."""
        if resumed:
            self._live.extend(rows)
        else:
            self._jobs.append(PrefillJob.of(rows))

    @without_autograd
    def _read(self) -> list[Emission]:
        """Read a chunk of the prompts; those that end give every row its first token."""
        try:
            readings, logits = read(self.session, list(portions(self._jobs, self._chunk)))
        except Exception as error:
            return self._make_room(error)
        ended = [place for place, job in enumerate(readings) if not job.left]
        rows: list[Row] = []
        where: list[int] = []
        for place in ended:
            rows += self._seat(readings[place])
            where += [place] * (len(rows) - len(where))
        self._jobs = [job for job in self._jobs if job.left]
        return (
            self._first(rows, [readings[place] for place in where], logits[where]) if rows else []
        )

    def _seat(self, job: PrefillJob) -> list[Row]:
        """Let the rows of a prompt that was read take their steps; return those to judge now."""
        first, *others = rows = job.rows
        self._live += rows
        if job.again:
            first.report.prefill(1000 * (time.perf_counter() - job.began), job.forwards)
            return []
        for row in others:
            row.slot = self.session.fork(_known(first.slot))
        for row in rows:
            self._attempt(row, job.notify, row)
        return [row for row in rows if not row.done]

    def _first(
        self, rows: Sequence[Row], readings: Sequence[PrefillJob], logits: Tensor
    ) -> list[Emission]:
        """Emit the first token of each row: logits [B, 1, V] after its prompt."""
        empty = [DraftTree.empty()] * len(rows)
        ends = [
            prefill_job.hidden[-1][:, -1:] if prefill_job.hidden else None
            for prefill_job in readings
        ]
        judged = judge(rows, empty, logits, ends, self._attempt)
        emissions = []
        for row, job, result in zip(rows, readings, judged, strict=True):
            if result is None:
                continue
            # From the row's start: opening drafters (an index of the prompt, a draft model's own
            # prefill) is work on the prompt too.
            spent = 1000 * (time.perf_counter() - row.started)
            step = self._attempt(row, emit, row, DraftTree.empty(), result[0], {"prefill": spent})
            if step is not None:
                row.report.prefill(spent, job.forwards)
                emissions.append(Emission(row, step))
        return emissions

    @without_autograd
    def _advance(self) -> list[Emission]:
        """Take one step in every row that is read."""
        pending_step, failure = self._ahead, self._failure
        self._ahead = self._failure = None
        try:
            if failure is not None:
                raise failure
            pending_step = pending_step or self._launch()
            if pending_step is None:
                return []
            landing = time.perf_counter()
            output = self._launcher.wait(pending_step)
            judged, top_tokens, hidden = self._judged(pending_step, output)
        except Exception as error:
            return self._make_room(error)
        rows, trees = pending_step.rows, pending_step.trees
        verified = time.perf_counter()
        waited = max(pending_step.launching + verified - landing, output.seconds)
        self.session.commit([() if match is None else match[0].path for match in judged])
        committed = time.perf_counter()
        spent = {
            "draft": 1000 * pending_step.drafting,
            "verify": 1000 * waited,
            "commit": 1000 * (committed - verified),
        }
        emissions = []
        for i, (row, tree, result) in enumerate(zip(rows, trees, judged, strict=True)):
            top, states = None if top_tokens is None else top_tokens[i], hidden[i]
            states = None if states is None else states[:, : len(tree) + 1]
            step = result and self._attempt(row, _finish, row, tree, *result, spent, top, states)
            if step is not None:
                emissions.append(Emission(row, step))
        host = 1000 * (time.perf_counter() - committed)
        for emission in emissions:
            emission.step.milliseconds["host"] = host
        return emissions

    def _judged(
        self, pending_step: InFlightStep, output: StepOutput
    ) -> tuple[
        list[tuple[Verdict, RowView] | None], list[TopTokens] | None, Sequence[Tensor | None]
    ]:
        """Return what the rules decide of a forward, and what drafters learn from."""
        rows, trees, logits = pending_step.rows, pending_step.trees, output.logits
        k = max(row.top for row in rows)
        selected = not any(row.distribution.processors for row in rows)
        top_tokens = (
            TopTokens.ranked(logits, k, [len(tree) + 1 for tree in trees], selected) if k else None
        )
        hidden = hidden_of(self.session, rows)
        return judge(rows, trees, logits, hidden, self._attempt, output.chosen), top_tokens, hidden

    def _make_room(self, error: Exception) -> list[Emission]:
        """Put a row back where memory has ended, before anybody was judged; raises other errors."""
        if not (self._isolate_errors and out_of_memory(error)):
            raise error
        lost = self.session.abandon()
        rows = self.rows
        if len(rows) == 1:
            rows[0].error = error
            return []
        for row in [row for row in self._live if row.slot in lost]:
            self._live.remove(row)
            self._jobs.append(PrefillJob.restart(row))
        self._put(max(rows, key=_left))
        self._most = len(self.rows)
        return []

    def _put(self, row: Row) -> None:
        """Put a row back: what is to be read of it, later, is all that was."""
        new = any(row in job.rows and not job.again for job in self._jobs)
        self.leave(row)
        self.session.shrink()
        self._put_back.append(PrefillJob.of([row]) if new else PrefillJob.restart(row))

    def _drafts(self) -> tuple[list[Row], list[DraftTree]]:
        """Line the rows up and return them with what is verified of their drafts."""
        self._forward.begin(len(self._live))
        drafts = {_known(row.slot): (row, self._attempt(row, propose, row)) for row in self._live}
        request = {slot: (row, tree) for slot, (row, tree) in drafts.items() if tree is not None}
        active_rows = (
            [request[slot] for slot in self.session.line_up(list(request))] if request else []
        )
        rows, trees = [row for row, _ in active_rows], [tree for _, tree in active_rows]
        lengths = [len(row.context.tokens) for row in rows]
        fitted = fit_together([row.budget for row in rows], trees, lengths)
        admitted = [
            self.session.admit(tree, place, row.context.tokens)
            for place, (row, tree) in enumerate(zip(rows, fitted, strict=True))
        ]
        self._forward.widen(1 + max(map(len, admitted), default=0))
        return rows, admitted

    def _attempt(
        self, row: Row, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Do something for a row; where it raises, the row has ended, if rows are apart."""
        if not self._isolate_errors:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            row.error = error
            return None


def _finish(
    row: Row,
    tree: DraftTree,
    verdict: Verdict,
    view: RowView,
    spent: dict[str, float],
    best: TopTokens | None,
    hidden: Tensor | None,
) -> Step:
    """Emit what the rule decided and let drafter and budget learn from it."""
    step = emit(row, tree, verdict, dict(spent))
    learn(row, step, view, best, hidden)
    return step


def _without(row: Row, readings: Sequence[PrefillJob]) -> Iterator[PrefillJob]:
    """Yield the readings less one row; where that read for others, these begin again."""
    for job in readings:
        if row not in job.rows:
            yield job
        elif others := [other for other in job.rows if other is not row]:
            if job.rows[0] is row:
                yield PrefillJob.of(others)
            else:
                job.rows = others
                yield job


def _left(row: Row) -> int:
    """Return how many tokens a row has still to read and to write."""
    return len(row.pending) + row.context.remaining


def _known(slot: int | None) -> int:
    assert slot is not None
    return slot


def _keep_hidden(session: TargetSession, rows: Sequence[Row]) -> None:
    """Let the session keep hidden states.

    Raises UnsupportedModelError where a distribution needs them.
    """
    if isinstance(session, CachedSession):
        session.keep_hidden()
    elif any(row.transform_reads for row in rows):
        raise UnsupportedModelError(
            "this model's last hidden states cannot be read, which its transform needs; "
            "expected a model that verifies trees or chains. Leave transform out."
        )


def _resumed(first: Row) -> bool:
    """Tell whether all but the root of a text that goes on was read before: it may be drafted for.

    A drafter that learns from hidden states still wants those of the root.
    """
    return first.stop.count > 0 and len(first.pending) == 1 and not first.hidden
