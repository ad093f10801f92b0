"""The prefill: prompts are read in chunks between the steps of running sequences."""

import sys
import time
from collections import abc
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from ragspec.drafters.base import Prefill
from ragspec.engine.sequence import MOST_NODES, Sequence, attempt
from ragspec.needs import HiddenStates
from ragspec.sampling.top_tokens import TopTokens
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification.base import TargetSession
from ragspec.verification.tree_session import TreeSession

T = TypeVar("T")
SHARED = 32  # equal first tokens from which on a prompt waits for another to be read


@dataclass(slots=True, eq=False)
class PrefillJob:
    """The sequences of one prompt while it is read, once for all of them.

    Attributes:
        again: Whether a sequence that was put back is read again. Its root waits for the next step,
            and its drafter is not notified.
        left: Tokens that the target has not read; the last is the root, unless it is read again.
        total: Tokens to read, 0 before the first forward.
        top_tokens, hidden: The target's best tokens and hidden states so far, if needed.
    """

    sequences: list[Sequence]
    again: bool = False
    left: list[int] = field(init=False)
    began: float = field(default_factory=time.perf_counter)
    forwards: int = 0
    total: int = 0
    top_tokens: list[TopTokens] = field(default_factory=list)
    hidden: list[HiddenStates] = field(default_factory=list)

    def __post_init__(self) -> None:
        first = self.sequences[0]
        self.left = first.context.tokens[:-1] if self.again else list(first.pending)

    def takes(self, sequence: Sequence) -> bool:
        """Return whether the sequence may share this prefill, which has not begun."""
        first = self.sequences[0]
        return (
            not (self.again or self.forwards or first.slot is not None)
            and not sequence.request.resume_from  # it may be cached, and take steps at once
            and first.request.tenant == sequence.request.tenant
            and self.left == sequence.pending
        )

    def begins_like(self, other: "PrefillJob") -> bool:
        """Return whether the prefix cache will hold the first tokens once the other is read."""
        first, before = self.sequences[0], other.sequences[0]
        return (
            first.slot is None
            and first.request.tenant == before.request.tenant
            and len(self.left) > SHARED
            and before.context.tokens[:SHARED] == self.left[:SHARED]
        )

    def join(self, session: TargetSession) -> int:
        """Return the first sequence's row in the session; take one if it has none."""
        first = self.sequences[0]
        if first.slot is None:
            room = first.context.remaining + (1 if first.drafter is None else MOST_NODES)
            first.slot, count = session.join(self.left, first.request.tenant, room)
            del self.left[:count]
            first.cached = max(first.cached, min(count, len(first.request.prompt)))
        return first.slot

    def report(self) -> None:
        """Call the progress callbacks after a forward, unless it has read all of a short prompt."""
        first = self.forwards == 1
        if self.again or (first and not self.left):
            return
        for sequence in self.sequences:
            if (on_read := sequence.request.on_read) is not None:
                for left in (self.total, len(self.left)) if first else (len(self.left),):
                    attempt(sequence, on_read, self.total - left, self.total)

    def notify(self, sequence: Sequence) -> None:
        """Give the drafter the best tokens and hidden states of the prompt's last tokens."""
        best = self.top_tokens[0] if self.top_tokens else None
        if len(self.top_tokens) > 1:
            best = TopTokens.of(torch.cat([part.there() for part in self.top_tokens]))
        states = HiddenStates.joined(self.hidden) if self.hidden else None
        count = len(best) if best is not None else 0 if states is None else len(states)
        if sequence.drafter is not None and count:
            tokens = np.asarray(sequence.context.tokens[-count:], dtype=np.int64)
            part = Prefill(tokens, best, states).restricted(sequence.needs)
            if part is not None:
                sequence.drafter.observe_prefill(part)


def portions(
    jobs: abc.Sequence[PrefillJob], chunk: int | None, session: TargetSession
) -> list[tuple[PrefillJob, int]]:
    """Return the prompts that the next forward reads, and how many tokens of each.

    They come in order of arrival, `chunk` tokens in all; None sets no limit. A prompt that begins
    like one before it waits, as the prefix cache will have its beginning.
    """
    parts: list[tuple[PrefillJob, int]] = []
    room = sys.maxsize if chunk is None else chunk
    for number, job in enumerate(jobs):
        if room == 0:
            break
        if chunk is None or not any(job.begins_like(other) for other in jobs[:number]):
            job.join(session)
            count = min(room, len(job.left))
            room -= count
            parts.append((job, count))
    return parts


def read(
    session: TargetSession, parts: abc.Sequence[tuple[PrefillJob, int]]
) -> tuple[list[PrefillJob], abc.Sequence[Tensor]]:
    """Read tokens of each prompt; return the jobs in the order of rows, and their logits [1, V]."""
    ordered = select(session, {job.sequences[0]: (job, count) for job, count in parts})
    rows = [row for row, _ in ordered]
    pending = [job.left[:count] for _, (job, count) in ordered]
    k = max(row.needs.top_tokens if row.needs.prompt_top_tokens else 0 for row in rows)
    top_tokens: list[TopTokens] = []
    if (k or any(row.needs.hidden_states for row in rows)) and isinstance(session, TreeSession):
        logits, top_tokens = session.read_prompts(pending, k)
    else:
        logits = session.verify(pending, [DraftTree.empty()] * len(rows))
    hidden = session.hidden
    session.commit([() for _ in rows])
    for i, (_, (job, count)) in enumerate(ordered):
        job.total = job.total or len(job.left)
        del job.left[:count]
        job.forwards += 1
        job.top_tokens += top_tokens[i : i + 1]
        job.hidden += hidden[i : i + 1]
    return [job for _, (job, _) in ordered], logits


def select(session: TargetSession, items: Mapping[Sequence, T]) -> list[tuple[Sequence, T]]:
    """Select the rows of some sequences in the session; return their items in its order."""
    by_slot = {row.slot: (row, item) for row, item in items.items()}
    order = session.select_rows([slot for slot in by_slot if slot is not None])
    return [by_slot[slot] for slot in order]
