"""The one loop: draft, verify, judge, commit, emit.

It knows sequences of token ids, a target session and a rule. It does not know text, documents,
pixels or how a drafter makes its tree. Sequences join and leave between its steps.

Faults end here. An error of one sequence ends that sequence alone. If a forward fails, each of its
rows is tried alone. If memory runs out, drafts are halved, then left out; then a sequence is put
back, which frees its memory, and read again once another one has left.
"""

from __future__ import annotations

import time
from collections import abc
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from ragspec.budget.goodput import fit_together
from ragspec.engine.prefill import PrefillJob, hidden_of, portions, read
from ragspec.engine.sequence import Sequence
from ragspec.engine.step import (
    Emission,
    InFlightStep,
    attempt,
    emit,
    finish,
    judge,
    propose,
    top_tokens_of,
)
from ragspec.models.device import out_of_memory
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best
from ragspec.verification.base import TargetSession
from ragspec.verification.tree_session import TreeSession

MOST_FAILURES = 2  # failed commits of a sequence, after each of which it is read again


class Loop:
    """Sequences that join, take their steps together over one session, and leave."""

    def __init__(self, session: TargetSession) -> None:
        self.session = session
        self._jobs: list[PrefillJob] = []
        self._live: list[Sequence] = []
        self._put_back: list[PrefillJob] = []
        self._ahead: InFlightStep | None = None  # the step that was launched ahead
        self._most = 0  # sequences for which there was memory when one was put back

    @property
    def room(self) -> bool:
        """Whether another sequence may join: as far as is known, there is memory for it."""
        return not self._put_back

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences that have joined, not left, and were not put back."""
        return [*self._live, *(each for job in self._jobs for each in job.sequences)]

    def join(self, sequence: Sequence) -> None:
        """Let a sequence join; its prompt is read in the next steps.

        Sequences of equal prompts share one prefill, as far as it has not begun.
        """
        if sequence.reads_hidden and isinstance(self.session, TreeSession):
            self.session.keep_hidden(sorted(sequence.reads_hidden))
        if sequence.done:
            return
        job = next((job for job in self._jobs if job.takes(sequence)), None)
        if job is not None:
            job.sequences.append(sequence)
        else:
            self._jobs.append(PrefillJob.of([sequence]))

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Let a sequence leave, whether or not its text has ended.

        Args:
            keep: Whether its keys and values may serve other texts.
        """
        if self._ahead is not None:
            self.session.discard_uncommitted()  # the other sequences draft again
            self._ahead = None
        if sequence in self._live:
            self._live.remove(sequence)
        self._jobs = list(_without(sequence, self._jobs))
        self._put_back = list(_without(sequence, self._put_back))
        if sequence.slot is not None:
            self.session.leave(sequence.slot, keep)
            sequence.slot = None

    def step(self, chunk: int | None = None, *, read_first: bool = False) -> list[Emission]:
        """Take one step in every sequence whose prompt is read, then read on in other prompts.

        Sequences that have ended leave. If the session supports it, the next forward is running on
        return.

        Args:
            chunk: Most tokens of prompts to read, None for all.
            read_first: Take no step before all prompts are read.

        Returns:
            The emissions of the sequences.
        """
        while self._put_back and len(self.sequences) < self._most:
            self._jobs.append(self._put_back.pop(0))
        advances = self._live and not (read_first and self._jobs)
        emissions: list[Emission] = []
        if advances:
            step, self._ahead = self._ahead or self._launch(), None
            emissions = self._take(step)
        if self._jobs and (jobs := self._resumed()):
            emissions += self._read(jobs, chunk)
        for sequence in [each for each in self.sequences if each.done]:
            self.leave(sequence)
        if self.session.ahead and self._live and not (read_first and self._jobs):
            self._ahead = self._launch()  # before the tokens of this step are handed on
        return emissions

    def _launch(self) -> InFlightStep:
        """Draft for every row and launch the forward; the step keeps an error until it is taken."""
        began = time.perf_counter()
        step = InFlightStep(self._live.copy())
        try:
            step.rows, step.trees = self._drafts(self._live)
        except Exception as error:
            step.error = error
            return step
        step.drafting = time.perf_counter() - began
        if step.rows:
            step.launch(self.session)
        return step

    def _take(self, step: InFlightStep) -> list[Emission]:
        """Return the emissions of a launched step, or of what is done after an error."""
        try:
            if step.error is not None:
                raise step.error
            return self._finish(step) if step.rows else []
        except Exception as error:
            return self._recover(error, step)

    def _read(self, jobs: abc.Sequence[PrefillJob], chunk: int | None) -> list[Emission]:
        """Read a chunk of the prompts; a prompt that ends gives each of its rows a first token.

        After an error they are read one by one, or a sequence is put back.
        """
        parts: list[tuple[PrefillJob, int]] = []
        try:
            parts = portions(jobs, chunk, self.session)
            ordered, logits = read(self.session, parts)
        except Exception as error:
            self.session.discard_uncommitted()
            if out_of_memory(error) and len(self.sequences) > 1:
                return self._make_room()
            jobs = [job for job, _ in parts] or jobs
            if len(jobs) > 1:
                return [e for job in jobs if job in self._jobs for e in self._read([job], chunk)]
            for sequence in jobs[0].sequences:
                sequence.error = error
            return []
        return self._after_prefill(ordered, logits)

    def _resumed(self) -> list[PrefillJob]:
        """Return the jobs with tokens to read; resumed texts that are cached take steps at once.

        A drafter that learns from hidden states still needs those of the root.
        """
        rest = []
        for job in self._jobs:
            first = job.sequences[0]
            learns = first.needs.hidden_states
            if first.stop.count > 0 and not (learns or job.again or job.forwards):
                with suppress(Exception):  # the read raises it again
                    job.join(self.session)
                if len(job.left) == 1 and first.slot is not None:
                    first.pending = list(job.left)
                    self._live += job.sequences
                    continue
            rest.append(job)
        self._jobs = rest
        return rest

    def _after_prefill(
        self, jobs: abc.Sequence[PrefillJob], logits: abc.Sequence[Tensor]
    ) -> list[Emission]:
        """Report the progress of prompts, and emit the first tokens of those that have ended."""
        ended: list[tuple[Sequence, PrefillJob, Tensor]] = []
        for job, row_logits in zip(jobs, logits, strict=False):
            for sequence, on_read, count, total in job.reports():
                attempt(sequence, on_read, count, total)
            if not job.left:
                ended += [(row, job, row_logits) for row in self._seat(job)]
        self._jobs = [job for job in self._jobs if job.left]
        return self._first(ended)

    def _seat(self, job: PrefillJob) -> list[Sequence]:
        """Let the rows of a prompt that was read take steps; return those that need a token now."""
        first, *others = rows = job.sequences
        if first.request.prefill:
            first.stop.reason = "length"
            self._live += rows  # they leave at the end of the step
            return []
        self._live += rows
        if job.again:
            first.prefill_ms += 1000 * (time.perf_counter() - job.began)
            first.prefill_forwards += job.forwards
            return []
        for row in others:
            row.slot = attempt(row, self.session.fork, _known(first.slot))
        for row in rows:
            if row.error is None:
                attempt(row, job.notify, row)
        return [row for row in rows if not row.done]

    def _first(self, ended: abc.Sequence[tuple[Sequence, PrefillJob, Tensor]]) -> list[Emission]:
        """Emit the first token of each row from the logits [1, V] after its prompt."""
        if not ended:
            return []
        rows, jobs, logits = zip(*ended, strict=True)
        ends = [job.hidden[-1].at(slice(-1, None)) if job.hidden else None for job in jobs]
        judged = judge(rows, [DraftTree.empty()] * len(rows), logits, ends)
        emissions = []
        for row, job, judgement in zip(rows, jobs, judged, strict=True):
            if judgement is None:
                continue
            # From the row's start: opening drafters (an index of the prompt, a draft model's own
            # prefill) is work on the prompt too.
            spent = 1000 * (time.perf_counter() - row.started)
            verdict, _ = judgement
            step = attempt(row, emit, row, DraftTree.empty(), verdict, {"prefill": spent})
            if step is not None:
                row.prefill_ms += spent
                row.prefill_forwards += job.forwards
                emissions.append(Emission(row, step))
        return emissions

    def _finish(self, step: InFlightStep) -> list[Emission]:
        """Wait for a forward, judge its drafts, and commit and emit the accepted tokens."""
        landing = time.perf_counter()
        session = self.session
        logits = session.settle()
        best = top_tokens_of(step.rows, step.trees, logits)
        hidden = hidden_of(session, step.rows)
        judged = judge(step.rows, step.trees, logits, hidden, session.chosen)
        verified = time.perf_counter()
        waited = max(step.launching + verified - landing, session.seconds)
        try:
            session.commit([() if match is None else match[0].path for match in judged])
        except Exception as error:
            return self._reread(step.rows, error)
        committed = time.perf_counter()
        spent = {
            "draft": 1000 * step.drafting,
            "verify": 1000 * waited,
            "commit": 1000 * (committed - verified),
        }
        emissions = []
        for i, (row, tree, match) in enumerate(zip(step.rows, step.trees, judged, strict=True)):
            states = hidden[i]
            states = None if states is None else states.at(slice(len(tree) + 1))
            emitted = match and attempt(row, finish, row, tree, *match, spent, best[i], states)
            if emitted is not None:
                emissions.append(Emission(row, emitted))
        host = 1000 * (time.perf_counter() - committed)
        for emission in emissions:
            emission.step.milliseconds["host"] = host
        return emissions

    def _recover(self, error: Exception, step: InFlightStep) -> list[Emission]:
        """Take the failed step again: with smaller drafts, alone, or after a row was put back."""
        self.session.discard_uncommitted()
        rows = [row for row in step.rows if row in self._live]
        if not rows:
            return []
        if out_of_memory(error) and any(map(len, step.trees)):
            smaller = [keep_best(tree, len(tree) // 2) for tree in step.trees]
            return self._again(step.rows, smaller)
        if len(rows) == 1 and (not out_of_memory(error) or len(self.sequences) == 1):
            rows[0].error = error
            return []
        if out_of_memory(error):
            return self._make_room()
        if not step.trees:  # a drafter or its budget failed outside of any row
            raise error
        pairs = list(zip(step.rows, step.trees, strict=True))
        return [each for row, tree in pairs for each in self._again([row], [tree])]

    def _again(
        self, rows: abc.Sequence[Sequence], trees: abc.Sequence[DraftTree]
    ) -> list[Emission]:
        """Verify these drafts in a forward of their own."""
        pairs = {_known(row.slot): (row, tree) for row, tree in zip(rows, trees, strict=True)}
        pairs = {slot: pair for slot, pair in pairs.items() if pair[0] in self._live}
        if not pairs:
            return []
        ordered = [pairs[slot] for slot in self.session.select_rows(list(pairs))]
        step = InFlightStep([row for row, _ in ordered], [tree for _, tree in ordered])
        step.launch(self.session)
        return self._take(step)

    def _reread(self, rows: abc.Sequence[Sequence], error: Exception) -> list[Emission]:
        """Read rows again whose cache a failed commit left in an unknown state."""
        self.session.discard_uncommitted()
        for row in rows:
            row.failures += 1
            if row.failures > MOST_FAILURES:
                row.error = error
                continue
            self.leave(row, keep=False)
            self._jobs.append(PrefillJob.restart(row))
        return []

    def _make_room(self) -> list[Emission]:
        """Put the sequence with most left to do back, and free its memory."""
        rows = self.sequences
        row = max(rows, key=lambda row: len(row.pending) + row.context.remaining)
        new = any(row in job.sequences and not job.again for job in self._jobs)
        self.leave(row)
        self.session.shrink()
        self._put_back.append(PrefillJob.of([row]) if new else PrefillJob.restart(row))
        self._most = len(self.sequences)
        return []

    def _drafts(self, live: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[DraftTree]]:
        """Select the rows of the next forward, and return them and their trimmed drafts."""
        drafts = {_known(row.slot): (row, attempt(row, propose, row, len(live))) for row in live}
        valid = {slot: (row, tree) for slot, (row, tree) in drafts.items() if tree is not None}
        ordered = [valid[slot] for slot in self.session.select_rows(list(valid))] if valid else []
        rows, trees = [row for row, _ in ordered], [tree for _, tree in ordered]
        trimmed = [
            self.session.trim_draft(tree, place, row.context.tokens)
            for place, (row, tree) in enumerate(zip(rows, trees, strict=True))
        ]
        return rows, fit_together([row.budget for row in rows], trimmed)


def _without(row: Sequence, jobs: abc.Sequence[PrefillJob]) -> abc.Iterator[PrefillJob]:
    """Yield the jobs less one sequence; if it read for others, their job begins again."""
    for job in jobs:
        if row not in job.sequences:
            yield job
        elif others := [other for other in job.sequences if other is not row]:
            if job.sequences[0] is row:
                yield PrefillJob.of(others)
            else:
                yield replace(job, sequences=others)


def _known(slot: int | None) -> int:
    """Return the slot of a row that has one."""
    assert slot is not None
    return slot
