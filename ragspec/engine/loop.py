"""The one loop: draft, verify, judge, commit, emit.

It knows rows of token ids, a target session and a rule. It does not know text, documents, pixels or
how a drafter makes its tree. Rows join and leave between its steps. In a call of the engine, all of
them join at once.
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
    finish,
    judge,
    propose,
)
from ragspec.errors import UnsupportedModelError
from ragspec.models.device import out_of_memory, without_autograd
from ragspec.rules.base import Rule, Verdict, open_rule
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
    """Yield the emissions of each step until every row is done; close it to stop early.

    Args:
        prompts: For each row the number of its prompt. Rows of one prompt are adjacent and share
            its prefill; the first of them has the prompt in `pending`.
        forward: The forward that the policies of the rows observe, kept up to date.
    """
    loop = Loop(session, forward)
    for prompt in dict.fromkeys(prompts):
        joining = [row for row, number in zip(rows, prompts, strict=True) if number == prompt]
        loop.join(joining, rule)
    while loop.rows:
        yield loop.step()


class Loop:
    """Rows that join, take their steps together over one session, and leave.

    If errors are isolated and memory runs out, the row with most left to do is put back. Its memory
    is freed, and its text is read again once another row has left.

    Args:
        forward: The forward that the policies of the rows observe, kept up to date.
        chunk: Tokens of prompts to read between two steps, None for all of them at once.
        difference: Isolate errors: an error of a row ends that row alone, as `Row.error`.
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
        self._failure: Exception | None = None  # or the error of its launch
        self._most = 0  # rows for which there was memory when one was put back

    @property
    def room(self) -> bool:
        """Whether another row may join: as far as is known, there is memory for it."""
        return not self._put_back

    @property
    def rows(self) -> list[Row]:
        """The rows that have joined and not left."""
        return [*self._live, *(row for job in self._jobs for row in job.rows)]

    def join(self, rows: Sequence[Row], rule: Rule, scope: str = "") -> None:
        """Let the rows of one prompt join; its text is read in the next steps.

        Args:
            scope: Cached tokens are shared between texts of one scope alone.

        Raises:
            UnsupportedModelError: A transform needs hidden states that the session cannot keep.
        """
        for row in rows:
            row.rule, row.scope = open_rule(rule), scope
        if any(row.reads_hidden for row in rows):
            if isinstance(self.session, CachedSession):
                self.session.keep_hidden()
            elif any(row.transform_reads for row in rows):
                raise UnsupportedModelError(
                    "this model's last hidden states cannot be read, which its transform needs; "
                    "expected a model that verifies trees or chains. Leave transform out."
                )
        first = rows[0]
        if first.done:
            return
        # If all but the root of a resumed text was read before, it takes steps at once. A drafter
        # that learns from hidden states still needs those of the root.
        if first.stop.count > 0 and len(first.pending) == 1 and not first.hidden:
            self._live.extend(rows)
        else:
            self._jobs.append(PrefillJob.of(list(rows)))

    def leave(self, row: Row) -> None:
        """Let a row leave, whether or not its text has ended."""
        if self._ahead is not None or self._failure is not None:
            self.session.discard_uncommitted()  # the other rows draft again
            self._ahead = self._failure = None
        if row in self._live:
            self._live.remove(row)
        self._jobs = list(_without(row, self._jobs))
        self._put_back = list(_without(row, self._put_back))
        if row.slot is not None:
            self.session.leave(row.slot)
            row.slot = None

    def step(self) -> list[Emission]:
        """Take one step in every row whose prompt is read, then read on in the other prompts.

        Rows that have ended leave. If the session supports it, the next forward is running on
        return.

        Returns:
            The emissions of the rows.
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

        The next step raises any error, so that no written token is lost.
        """
        try:
            self._ahead = self._launch()
        except Exception as error:
            self.session.discard_uncommitted()
            self._failure = error

    def _launch(self) -> InFlightStep | None:
        """Draft for every row and launch the forward; return None if no row is left to verify."""
        began = time.perf_counter()
        rows, trees = self._drafts()
        if not rows:
            return None
        pending_step = InFlightStep(rows, trees, time.perf_counter() - began)
        self._launcher.launch(pending_step)
        return pending_step

    @without_autograd
    def _read(self) -> list[Emission]:
        """Read a chunk of the prompts; a prompt that ends gives each of its rows a first token."""
        try:
            jobs, logits = read(self.session, list(portions(self._jobs, self._chunk)))
        except Exception as error:
            return self._make_room(error)
        rows: list[Row] = []
        where: list[int] = []
        for place, job in enumerate(jobs):
            if not job.left:
                rows += self._seat(job)
                where += [place] * (len(rows) - len(where))
        self._jobs = [job for job in self._jobs if job.left]
        return self._first(rows, [jobs[place] for place in where], logits[where]) if rows else []

    def _seat(self, job: PrefillJob) -> list[Row]:
        """Let the rows of a prompt that was read take steps; return those that need a token now."""
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
        self, rows: Sequence[Row], jobs: Sequence[PrefillJob], logits: Tensor
    ) -> list[Emission]:
        """Emit the first token of each row from the logits [B, 1, V] after its prompt."""
        empty = [DraftTree.empty()] * len(rows)
        ends = [job.hidden[-1][:, -1:] if job.hidden else None for job in jobs]
        judged = judge(rows, empty, logits, ends, self._attempt)
        emissions = []
        for row, job, judgement in zip(rows, jobs, judged, strict=True):
            if judgement is None:
                continue
            # From the row's start: opening drafters (an index of the prompt, a draft model's own
            # prefill) is work on the prompt too.
            spent = 1000 * (time.perf_counter() - row.started)
            verdict, _ = judgement
            step = self._attempt(row, emit, row, DraftTree.empty(), verdict, {"prefill": spent})
            if step is not None:
                row.report.prefill(spent, job.forwards)
                emissions.append(Emission(row, step))
        return emissions

    @without_autograd
    def _advance(self) -> list[Emission]:
        """Take one step in every row whose prompt is read."""
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
        for i, (row, tree, match) in enumerate(zip(rows, trees, judged, strict=True)):
            top, states = None if top_tokens is None else top_tokens[i], hidden[i]
            states = None if states is None else states[:, : len(tree) + 1]
            step = match and self._attempt(row, finish, row, tree, *match, spent, top, states)
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
        """Return the decisions of the rules, and top tokens and hidden states for the drafters."""
        rows, trees, logits = pending_step.rows, pending_step.trees, output.logits
        top_tokens: list[TopTokens] | None = None
        if k := max(row.top for row in rows):
            unchanged = not any(row.distribution.processors for row in rows)
            top_tokens = TopTokens.ranked(logits, k, [len(tree) + 1 for tree in trees], unchanged)
        hidden = hidden_of(self.session, rows)
        return judge(rows, trees, logits, hidden, self._attempt, output.chosen), top_tokens, hidden

    def _make_room(self, error: Exception) -> list[Emission]:
        """Put a row back if memory ran out, before any verdict; raise other errors."""
        if not (self._isolate_errors and out_of_memory(error)):
            raise error
        lost = self.session.discard_uncommitted()
        rows = self.rows
        if len(rows) == 1:
            rows[0].error = error
            return []
        for row in [row for row in self._live if row.slot in lost]:
            self._live.remove(row)
            self._jobs.append(PrefillJob.restart(row))
        row = max(rows, key=lambda row: len(row.pending) + row.context.remaining)
        new = any(row in job.rows and not job.again for job in self._jobs)
        self.leave(row)
        self.session.shrink()
        self._put_back.append(PrefillJob.of([row]) if new else PrefillJob.restart(row))
        self._most = len(self.rows)
        return []

    def _drafts(self) -> tuple[list[Row], list[DraftTree]]:
        """Select the rows of the next forward, and return them and their trimmed drafts."""
        self._forward.begin(len(self._live))
        drafts = {_known(row.slot): (row, self._attempt(row, propose, row)) for row in self._live}
        valid = {slot: (row, tree) for slot, (row, tree) in drafts.items() if tree is not None}
        ordered = [valid[slot] for slot in self.session.select_rows(list(valid))] if valid else []
        rows, trees = [row for row, _ in ordered], [tree for _, tree in ordered]
        lengths = [len(row.context.tokens) for row in rows]
        fitted = fit_together([row.budget for row in rows], trees, lengths)
        admitted = [
            self.session.trim_draft(tree, place, row.context.tokens)
            for place, (row, tree) in enumerate(zip(rows, fitted, strict=True))
        ]
        self._forward.widen(1 + max(map(len, admitted), default=0))
        return rows, admitted

    def _attempt(
        self, row: Row, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs
    ) -> T | None:
        """Call a function for a row; if errors are isolated, an error ends the row instead."""
        if not self._isolate_errors:
            return function(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except Exception as error:
            row.error = error
            return None


def _without(row: Row, jobs: Sequence[PrefillJob]) -> Iterator[PrefillJob]:
    """Yield the jobs less one row; if it read for others, their job begins again."""
    for job in jobs:
        if row not in job.rows:
            yield job
        elif others := [other for other in job.rows if other is not row]:
            if job.rows[0] is row:
                yield PrefillJob.of(others)
            else:
                job.rows = others
                yield job


def _known(slot: int | None) -> int:
    assert slot is not None
    return slot
