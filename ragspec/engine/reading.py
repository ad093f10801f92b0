"""The prefill: prompts are read all at once, or in chunks between other rows' steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import Prefill, notify_prefill
from ragspec.engine.rows import Row
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import CachedSession, TargetSession


@dataclass(slots=True, eq=False)
class PrefillJob:
    """The rows of one prompt while it is read, once for all of them.

    Attributes:
        left: Tokens that the target has not read; the last is the root, unless it is read again.
        again: Whether a sequence that was put back is read again. Its root waits for the next step,
            and its drafter is not notified.
        began: Seconds of the performance counter.
        forwards: Number of forwards so far.
        top_tokens, hidden: The target's best tokens and hidden states so far, if needed.
    """

    rows: list[Row]
    left: list[int]
    again: bool = False
    began: float = field(default_factory=time.perf_counter)
    forwards: int = 0
    top_tokens: list[TopTokens] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, rows: list[Row]) -> PrefillJob:
        """Return the job of new rows, which reads the first row's `pending` tokens."""
        return cls(rows, list(rows[0].pending))

    @classmethod
    def restart(cls, row: Row) -> PrefillJob:
        """Return the job that reads a row again, which then continues."""
        return cls([row], row.context.tokens[:-1], again=True)

    def join(self, session: TargetSession) -> int:
        """Return the first row's slot in the session; take one if it has none."""
        first = self.rows[0]
        if first.slot is None:
            first.slot, cached = session.join(self.left, first.scope)
            del self.left[:cached]
            first.report.cached = max(first.report.cached, cached)
        return first.slot

    def note(self, count: int, top_tokens: TopTokens | None, hidden: Tensor | None) -> None:
        """Record a forward that read `count` more tokens, and its best tokens and hidden states."""
        del self.left[:count]
        self.forwards += 1
        if top_tokens is not None:
            self.top_tokens.append(top_tokens)
        if hidden is not None:
            self.hidden.append(hidden)

    def notify(self, row: Row) -> None:
        """Give the row's drafter the best tokens and hidden states of the prompt's last tokens."""
        best, states = _joined(self.top_tokens), None
        if self.hidden:
            states = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden, 1)
        count = len(best) if best is not None else 0 if states is None else states.shape[1]
        if row.drafter is not None and count:
            tokens = np.asarray(row.context.tokens[-count:], dtype=np.int64)
            reads = row.top > 0 and row.reads_prompt
            notify_prefill(row.drafter, Prefill(tokens, best, states), reads, row.hidden)


def portions(jobs: Sequence[PrefillJob], chunk: int | None) -> Iterator[tuple[PrefillJob, int]]:
    """Yield the prompts that the next forward reads, and how many tokens of each.

    They come in order of arrival, as many as fill at most `chunk` positions, padding included; None
    sets no limit.
    """
    longest = 0
    for number, job in enumerate(jobs, start=1):
        count = len(job.left) if chunk is None else min(chunk, len(job.left))
        longest = max(longest, count)
        if chunk is not None and number > 1 and number * longest > chunk:
            return
        yield job, count


def read(
    session: TargetSession, parts: Sequence[tuple[PrefillJob, int]]
) -> tuple[list[PrefillJob], Tensor]:
    """Read the given number of tokens of each prompt.

    Returns:
        The jobs in the order of their rows, and the logits after those tokens [B, 1, V].
    """
    by_slot = {job.join(session): (job, count) for job, count in parts}
    ordered = [by_slot[slot] for slot in session.select_rows(list(by_slot))]
    rows = [job.rows[0] for job, _ in ordered]
    pending = [job.left[:count] for job, count in ordered]
    k = max(row.top if row.reads_prompt else 0 for row in rows)
    top_tokens: list[TopTokens] = []
    if (k or any(row.hidden for row in rows)) and isinstance(session, CachedSession):
        logits, top_tokens = session.read_prompts(pending, k)
    else:
        logits = session.verify(pending, [DraftTree.empty()] * len(rows))
    hidden = hidden_of(session, rows)
    session.commit([() for _ in rows])
    for i, (job, count) in enumerate(ordered):
        job.note(count, top_tokens[i] if top_tokens else None, hidden[i])
    return [job for job, _ in ordered], logits


def hidden_of(session: TargetSession, rows: Sequence[Row]) -> Sequence[Tensor | None]:
    """Return the hidden states of the last forward, row by row; None if none are kept."""
    needed = any(row.reads_hidden for row in rows)  # first: a check of a protocol takes 0.1 ms
    states = session.hidden if needed and isinstance(session, CachedSession) else []
    return states or [None] * len(rows)


def _joined(top_tokens: Sequence[TopTokens]) -> TopTokens | None:
    """Return the best tokens of several forwards as those of one."""
    if len(top_tokens) < 2:
        return top_tokens[0] if top_tokens else None
    return TopTokens.of(torch.cat([part.there() for part in top_tokens]))
