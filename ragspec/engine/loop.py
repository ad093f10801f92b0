"""The one loop: draft, verify, judge, commit, emit.

It knows sequences of token ids, a target session and a rule. It does not know text, documents,
pixels or how a drafter makes its tree. Sequences join and leave between its steps.

Faults end here. An error of one sequence ends that sequence alone. If a forward fails, each of its
rows is tried alone. If memory runs out, drafts are halved, then left out; then a sequence is put
back, which frees its memory, and read again once another one has left.
"""

import time
from collections import abc
from contextlib import suppress

from torch import Tensor

from ragspec.budget.goodput import fit_together
from ragspec.engine.prefill import PrefillJob, portions, read, select
from ragspec.engine.sequence import Sequence, attempt
from ragspec.engine.step import InFlightStep, emit, finish, judge, propose, top_tokens_of
from ragspec.models.device import out_of_memory
from ragspec.needs import HiddenStates
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
        """Let a sequence join, and share the prefill of an equal prompt if that has not begun."""
        taps = {*sequence.needs.hidden_states, *sequence.transform_taps}
        if taps and isinstance(self.session, TreeSession):
            self.session.keep_hidden(sorted(taps))
        if sequence.done:
            return
        job = next((job for job in self._jobs if job.takes(sequence)), None)
        if job is not None:
            job.sequences.append(sequence)
        else:
            self._jobs.append(PrefillJob([sequence]))

    def leave(self, sequence: Sequence, *, keep: bool = True) -> None:
        """Let a sequence leave, whether or not its text has ended; see `TargetSession.leave`."""
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

    def step(self, chunk: int | None = None, *, read_first: bool = False) -> None:
        """Take one step in every sequence whose prompt is read, then read on in other prompts.

        Sequences that have ended leave. If the session supports it, the next forward is running on
        return.

        Args:
            chunk: Most tokens of prompts to read, None for all.
            read_first: Take no step before all prompts are read.
        """
        while self._put_back and len(self.sequences) < self._most:
            self._jobs.append(self._put_back.pop(0))
        if self._live and not (read_first and self._jobs):
            step, self._ahead = self._ahead or self._launch(InFlightStep(self._live.copy())), None
            self._take(step)
        self._jobs = [job for job in self._jobs if not self._resumes(job)]
        if self._jobs:
            self._read(self._jobs, chunk)
        for sequence in [each for each in self.sequences if each.done]:
            self.leave(sequence)
        if self.session.ahead and self._live and not (read_first and self._jobs):
            # The device computes while the tokens of this step are handed on.
            self._ahead = self._launch(InFlightStep(self._live.copy()))

    def _launch(self, step: InFlightStep) -> InFlightStep:
        """Launch a forward, of new drafts if there are none; an error waits until it is taken."""
        began = time.perf_counter()
        try:
            if not step.trees:
                step.rows, step.trees = self._drafts(step.rows)
            drafted = time.perf_counter()
            if step.rows:
                follows = all(row.follows for row in step.rows)
                texts = [(row.distribution, row.context.tokens) for row in step.rows]
                pending = [row.pending for row in step.rows]
                self.session.launch(pending, step.trees, texts if follows else None)
            launching = time.perf_counter() - drafted
            step.spent = {"draft": 1000 * (drafted - began), "verify": 1000 * launching}
        except Exception as error:
            step.error = error
        return step

    def _take(self, step: InFlightStep) -> None:
        """Finish a launched step, or take it again after an error."""
        try:
            if step.error is not None:
                raise step.error
            if step.rows:
                self._finish(step)
        except Exception as error:
            self._recover(error, step)

    def _read(self, jobs: abc.Sequence[PrefillJob], chunk: int | None) -> None:
        """Read a chunk of the prompts; a prompt that ends gives each of its rows a first token.

        After an error they are read one by one, or a sequence is put back.
        """
        parts: list[tuple[PrefillJob, int]] = []
        try:
            parts = portions(jobs, chunk, self.session)
            ordered, logits = read(self.session, parts)
        except Exception as error:
            self.session.discard_uncommitted()
            jobs = [job for job, _ in parts] or jobs
            if out_of_memory(error) and len(self.sequences) > 1:
                self._make_room()
            elif len(jobs) == 1:
                for sequence in jobs[0].sequences:
                    sequence.error = error
            else:
                for job in jobs:
                    if job in self._jobs:
                        self._read([job], chunk)
        else:
            self._after_prefill(ordered, logits)

    def _resumes(self, job: PrefillJob) -> bool:
        """Let a resumed text that is cached take steps at once; return whether it does.

        A drafter that learns from hidden states still needs those of the root.
        """
        first = job.sequences[0]
        if not first.stop.count or first.needs.hidden_states or job.again or job.forwards:
            return False
        with suppress(Exception):  # the read raises it again
            job.join(self.session)
        if len(job.left) > 1 or first.slot is None:
            return False
        first.pending = list(job.left)
        self._live += job.sequences
        return True

    def _after_prefill(self, jobs: abc.Sequence[PrefillJob], logits: abc.Sequence[Tensor]) -> None:
        """Report the progress of prompts, and emit the first tokens of those that have ended."""
        rows, scores, ends = list[Sequence](), list[Tensor](), list[HiddenStates | None]()
        for job, row_logits in zip(jobs, logits, strict=False):
            job.report()
            if not job.left:
                seated = self._seat(job)
                rows += seated
                scores += [row_logits] * len(seated)
                ends += [job.hidden[-1].at(slice(-1, None)) if job.hidden else None] * len(seated)
        self._jobs = [job for job in self._jobs if job.left]
        judged = judge(rows, [DraftTree.empty()] * len(rows), scores, ends)
        for row, match in zip(rows, judged, strict=True):
            # From the row's start: opening drafters (an index of the prompt, a draft model's own
            # prefill) is work on the prompt too.
            spent = 1000 * (time.perf_counter() - row.started)
            row.prefill_ms += spent
            if match is not None:
                attempt(row, emit, row, DraftTree.empty(), *match, {"prefill": spent})

    def _seat(self, job: PrefillJob) -> list[Sequence]:
        """Let the rows of a prompt that was read take steps; return those that need a token now."""
        rows, slot = job.sequences, job.join(self.session)
        self._live += rows
        if job.again:
            rows[0].prefill_ms += 1000 * (time.perf_counter() - job.began)
        for row in rows:
            row.prefill_forwards += job.forwards
            row.cached = rows[0].cached
            if row.slot is None:
                row.slot = attempt(row, self.session.fork, slot)
            if row.error is None and not job.again:
                attempt(row, job.notify, row)
        return [] if job.again else [row for row in rows if not row.done]

    def _finish(self, step: InFlightStep) -> None:
        """Wait for a forward, judge its drafts, and commit and emit the accepted tokens."""
        landing, session, spent = time.perf_counter(), self.session, step.spent
        logits = session.settle()
        best = top_tokens_of(step.rows, step.trees, logits)
        hidden: abc.Sequence[HiddenStates | None] = session.hidden or [None] * len(step.rows)
        judged = judge(step.rows, step.trees, logits, hidden, session.chosen)
        verified = time.perf_counter()
        spent["verify"] = max(spent["verify"] + 1000 * (verified - landing), 1000 * session.seconds)
        try:
            session.commit([() if match is None else match[0].path for match in judged])
        except Exception as error:
            session.discard_uncommitted()
            for row in step.rows:  # their caches are in an unknown state, so they are read again
                row.failures += 1
                if row.failures > MOST_FAILURES:
                    row.error = error
                else:
                    self.leave(row, keep=False)
                    self._jobs.append(PrefillJob([row], again=True))
            return
        committed = time.perf_counter()
        spent["commit"] = 1000 * (committed - verified)
        for i, (row, tree, match) in enumerate(zip(step.rows, step.trees, judged, strict=True)):
            if match is not None:
                attempt(row, finish, row, tree, *match, spent, best[i], hidden[i])
        spent["host"] = 1000 * (time.perf_counter() - committed)
        for row, match in zip(step.rows, judged, strict=True):
            if match is not None and row.budget is not None and not row.done:
                attempt(row, row.budget.observe, row.steps[-1])

    def _recover(self, error: Exception, step: InFlightStep) -> None:
        """Take the failed step again: with smaller drafts, alone, or after a row was put back."""
        self.session.discard_uncommitted()
        rows = [row for row in step.rows if row in self._live]
        if not rows:
            return
        pairs = dict(zip(step.rows, step.trees, strict=False))
        if out_of_memory(error) and any(map(len, step.trees)):
            self._again({row: keep_best(tree, len(tree) // 2) for row, tree in pairs.items()})
        elif out_of_memory(error) and len(self.sequences) > 1:
            self._make_room()
        elif len(rows) == 1:
            rows[0].error = error
        elif not pairs:  # a drafter or its budget failed outside of any row
            raise error
        else:
            for row, tree in pairs.items():
                self._again({row: tree})

    def _again(self, drafts: abc.Mapping[Sequence, DraftTree]) -> None:
        """Verify these drafts in a forward of their own, but for rows that have left."""
        drafts = {row: tree for row, tree in drafts.items() if row in self._live}
        if drafts:
            rows, trees = zip(*select(self.session, drafts), strict=True)
            self._take(self._launch(InFlightStep([*rows], [*trees])))

    def _make_room(self) -> None:
        """Put the sequence with most left to do back, and free its memory."""
        row = max(self.sequences, key=lambda row: len(row.pending) + row.context.remaining)
        new = any(row in job.sequences and not job.again for job in self._jobs)
        self.leave(row)
        self.session.shrink()
        self._put_back.append(PrefillJob([row], again=not new))
        self._most = len(self.sequences)

    def _drafts(self, live: abc.Sequence[Sequence]) -> tuple[list[Sequence], list[DraftTree]]:
        """Select the rows of the next forward, and return them and their trimmed drafts."""
        drafts = {row: attempt(row, propose, row, len(live)) for row in live}
        valid = {row: tree for row, tree in drafts.items() if tree is not None}
        ordered = select(self.session, valid)
        trim = self.session.trim_draft
        trimmed = [trim(tree, at, row.context.tokens) for at, (row, tree) in enumerate(ordered)]
        rows = [row for row, _ in ordered]
        return rows, fit_together([row.budget for row in rows], trimmed)


def _without(row: Sequence, jobs: abc.Sequence[PrefillJob]) -> abc.Iterator[PrefillJob]:
    """Yield the jobs less one sequence; if it read for others, their job begins again."""
    for job in jobs:
        reads = job.sequences[0] is row
        if row in job.sequences:
            job.sequences.remove(row)
        if job.sequences:
            yield PrefillJob(job.sequences) if reads else job
