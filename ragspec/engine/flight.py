"""Forwards between their launch and their end; what the host does meanwhile costs no time.

Where the session can, a forward is launched before the tokens of the last one are handed on, so
that texts are decoded, reports written and callers served while the device computes. What follows
depends on no clock: the same drafts are verified, by the same laws.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ragspec.engine.rows import Row
from ragspec.engine.step import follows
from ragspec.target.base import StepSession, TargetSession
from ragspec.trees.draft_tree import DraftTree


@dataclass(slots=True)
class Flight:
    """One forward and the drafts that it verifies. drafting, launching: seconds of the host."""

    rows: list[Row]
    trees: list[DraftTree]
    drafting: float
    launching: float = 0.0


@dataclass(frozen=True, slots=True)
class Landed:
    """What a forward gave: logits [B, n, V]; the target's own tokens, where it tells them.

    seconds: that the device took, 0 where it does not say.
    """

    logits: torch.Tensor
    chosen: list[list[int]] | None
    seconds: float = 0.0


class Launcher:
    """Launches the forwards of a session, and waits for them."""

    def __init__(self, session: TargetSession) -> None:
        self.session = session
        # Asked once: to ask a protocol takes 0.1 ms.
        self._steps = session if isinstance(session, StepSession) else None

    @property
    def ahead(self) -> bool:
        """Whether a forward may be under way while the host does other things."""
        return self._steps is not None

    def launch(self, flight: Flight) -> None:
        """Begin a forward, where the session does not wait for its end."""
        session, rows = self._steps, flight.rows
        if session is None:
            return
        if all(follows(row) for row in rows):
            session.follow([row.law for row in rows], [row.context.tokens for row in rows])
        began = time.perf_counter()
        session.launch(_pending(rows), flight.trees)
        flight.launching = time.perf_counter() - began

    def land(self, flight: Flight) -> Landed:
        """Return what a forward that was begun gives."""
        session = self._steps
        if session is None:
            return Landed(self.session.verify(_pending(flight.rows), flight.trees), None)
        return Landed(session.settle(), session.chosen, session.seconds)


def _pending(rows: Sequence[Row]) -> list[Sequence[int]]:
    return [row.pending for row in rows]
