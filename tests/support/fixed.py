"""Drafters for tests of drafters that contain others: one fixed tree, or only faults."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, NodeChances
from ragspec.needs import Needs
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftKind, DraftTree


@dataclass
class FixedDrafter(Drafter):
    """Proposes one tree: a chain of the tokens, or siblings, or by parents.

    matched, distributions: those of its session. seconds: time of every draft on the clock, see
    `fake_clock`.
    """

    tokens: Sequence[int]
    name: str = "fixed"
    accept_prob: Sequence[float] | None = None
    kind: DraftKind = DraftKind.DETERMINISTIC
    matched: int | None = None
    distributions: list[NodeChances] | None = None
    siblings: bool = False
    parents: Sequence[int] | None = None
    origin: tuple[int, int] = (-1, -1)
    observed: list[object] = field(default_factory=list)
    seconds: float = 0.0
    looks_up: bool = True
    needs: Needs = field(default_factory=Needs)
    clock: list[float] = field(default_factory=lambda: [0.0])

    def open(self, request: DraftRequest) -> FixedSession:
        return FixedSession(self)


class FixedSession(DraftSession):
    def __init__(self, drafter: FixedDrafter) -> None:
        self.drafter = drafter
        self.matched = drafter.matched

    def distributions(self) -> list[NodeChances] | None:
        return self.drafter.distributions

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        self.drafter.clock[0] += self.drafter.seconds
        drafter, n = self.drafter, min(len(self.drafter.tokens), budget)
        parents = list(range(-1, n - 1)) if drafter.parents is None else drafter.parents[:n]
        return DraftTree.build(
            drafter.tokens[:n],
            [-1] * n if drafter.siblings else parents,
            drafter.name,
            accept_prob=None if drafter.accept_prob is None else drafter.accept_prob[:n],
            origin=np.asarray([drafter.origin] * n, dtype=np.int64),
            kind=drafter.kind,
        )

    def observe(self, step: Step) -> None:
        self.drafter.observed.append(step)


def fake_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Replace the clock of fusions by the one number in the returned list."""
    now = [0.0]
    monkeypatch.setattr("ragspec.drafters.fuse.perf_counter", lambda: now[0])
    return now


@dataclass
class BrokenDrafter(Drafter, DraftSession):
    """Raises at every turn."""

    name: str = "broken"
    kind: DraftKind = DraftKind.DETERMINISTIC

    def open(self, request: DraftRequest) -> BrokenDrafter:
        return self

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        raise RuntimeError("as always")

    def observe(self, step: Step) -> None:
        raise RuntimeError("as always")
