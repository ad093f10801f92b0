"""Prompts on their way into the cache: all at once, or in chunks between other rows' steps."""

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
    """The rows of one prompt while it is read, for all of them.

    left: tokens that the target has not seen, at the end the root, but of a text that is read
    `again`: its root waits for the next step, and nobody is told. began: seconds of the performance
    counter. tops, hidden: what the forwards knew of its tokens, where that is wanted.
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
        """Return the reading of rows of which nothing is read, but what `pending` leaves out."""
        return cls(rows, list(rows[0].pending))

    @classmethod
    def restart(cls, row: Row) -> PrefillJob:
        """Return the reading of a row that was read, and is to go on where it was."""
        return cls([row], row.context.tokens[:-1], again=True)

    def join(self, session: TargetSession) -> int:
        """Return the row of the session that the first row has, and takes now if it had none."""
        first = self.rows[0]
        if first.slot is None:
            first.slot, known = session.join(self.left, first.scope)
            del self.left[:known]
            first.report.cached = max(first.report.cached, known)
        return first.slot

    def note(self, count: int, top_tokens: TopTokens | None, hidden: Tensor | None) -> None:
        """Note that `count` more tokens were read, and what the target knew of their ends."""
        del self.left[:count]
        self.forwards += 1
        if top_tokens is not None:
            self.top_tokens.append(top_tokens)
        if hidden is not None:
            self.hidden.append(hidden)

    def notify(self, row: Row) -> None:
        """Tell the row's drafter what was known of the prompt's last tokens."""
        best, states = _joined(self.top_tokens), None
        if self.hidden:
            states = self.hidden[0] if len(self.hidden) == 1 else torch.cat(self.hidden, 1)
        count = len(best) if best is not None else 0 if states is None else states.shape[1]
        if row.drafter is not None and count:
            tokens = np.asarray(row.context.tokens[-count:], dtype=np.int64)
            reads = row.top > 0 and row.reads_prompt
            notify_prefill(row.drafter, Prefill(tokens, best, states), reads, row.hidden)


def portions(readings: Sequence[PrefillJob], chunk: int | None) -> Iterator[tuple[PrefillJob, int]]:
    """Yield which prompts are read by the next forward, and how many tokens of each.

    In order of arrival, as many in one batch as take no more than `chunk` positions, padding
    counted; None sets no limit.
    """
    longest = 0
    for number, job in enumerate(readings, start=1):
        count = len(job.left) if chunk is None else min(chunk, len(job.left))
        longest = max(longest, count)
        if chunk is not None and number > 1 and number * longest > chunk:
            return
        yield job, count


def read(
    session: TargetSession, parts: Sequence[tuple[PrefillJob, int]]
) -> tuple[list[PrefillJob], Tensor]:
    """Read so many tokens of each prompt, which have joined.

    Returns the readings in the order of their rows and the logits after those tokens [B, 1, V].
    """
    by_slot = {prefill_job.join(session): (prefill_job, count) for prefill_job, count in parts}
    active_rows = [by_slot[slot] for slot in session.line_up(list(by_slot))]
    rows = [prefill_job.rows[0] for prefill_job, _ in active_rows]
    pending = [prefill_job.left[:count] for prefill_job, count in active_rows]
    k = max(row.top if row.reads_prompt else 0 for row in rows)
    top_tokens: list[TopTokens] = []
    if (k or any(row.hidden for row in rows)) and isinstance(session, CachedSession):
        logits, top_tokens = session.read_prompts(pending, k)
    else:
        logits = session.verify(pending, [DraftTree.empty()] * len(rows))
    hidden = hidden_of(session, rows)
    session.commit([() for _ in rows])
    for i, (job, count) in enumerate(active_rows):
        job.note(count, top_tokens[i] if top_tokens else None, hidden[i])
    return [prefill_job for prefill_job, _ in active_rows], logits


def hidden_of(session: TargetSession, rows: Sequence[Row]) -> Sequence[Tensor | None]:
    """Return the hidden states of the last forward, row by row; None where none are kept."""
    needed = any(row.reads_hidden for row in rows)  # first: to ask a protocol takes 0.1 ms
    states = session.hidden if needed and isinstance(session, CachedSession) else []
    return states or [None] * len(rows)


def _joined(top_tokens: Sequence[TopTokens]) -> TopTokens | None:
    """Return the best tokens of several forwards as those of one."""
    if len(top_tokens) < 2:
        return top_tokens[0] if top_tokens else None
    return TopTokens.of(torch.cat([part.there() for part in top_tokens]))
