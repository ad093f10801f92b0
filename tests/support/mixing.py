"""A drafter for tests: the true continuation mixed with noise, so that much is accepted and much is
not, as a tree with wrong siblings in random order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.trees.draft_tree import DraftKind, DraftTree


@dataclass(frozen=True)
class MixingDrafter(Drafter):
    """Knows the true continuations by prompt; each draft token is right with probability 0.7."""

    truth: dict[tuple[int, ...], list[int]]
    depth: int = 5
    right: float = 0.7
    name: str = "mixing"
    kind: DraftKind = DraftKind.DETERMINISTIC

    def open(self, request: DraftRequest) -> MixingSession:
        return MixingSession(self, self.truth[request.prompt], request.vocab_size)


class MixingSession(DraftSession):
    def __init__(self, drafter: MixingDrafter, truth: list[int], vocab_size: int) -> None:
        self.drafter = drafter
        self.truth = truth
        self.vocab_size = vocab_size
        self.rng = np.random.default_rng(0)

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        ahead = self.truth[context.generated : context.generated + self.drafter.depth]
        tokens: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in ahead:
            wrong = int(self.rng.integers(self.vocab_size))
            right = token if self.rng.random() < self.drafter.right else (wrong + 1)
            level = [wrong, right % self.vocab_size]
            if self.rng.random() < 0.5:
                level.reverse()
            for sibling in dict.fromkeys(level):
                tokens.append(sibling)
                parents.append(parent)
            parent = tokens.index(level[-1], len(tokens) - len(set(level)))
        return DraftTree.build(tokens[:budget], parents[:budget], self.drafter.name)
