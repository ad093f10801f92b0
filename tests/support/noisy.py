"""A drafter for tests of token identity: trees that mix the true continuation with noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.trees.draft_tree import ROOT, DraftTree


class NoisyTrees(Drafter):
    """Proposes the true continuation among wrong siblings, which have children too.

    truths: by prompt, what plain decoding generates. spoiled: how often the true token is left
    out. Wrong nodes stand before, between and after the true path, so that accepted nodes lie
    scattered over the slots of the cache. Nodes claim less the deeper and the wronger they are.
    """

    name = "noisy"

    def __init__(self, truths: Mapping[tuple[int, ...], Sequence[int]], spoiled: float = 0.2):
        self.truths = truths
        self.spoiled = spoiled

    def open(self, request: DraftRequest) -> NoisySession:
        return NoisySession(self.truths[request.prompt], self.spoiled, request.vocab_size)


class NoisySession(DraftSession):
    """The noisy trees of one row; they depend on the generated index alone."""

    def __init__(self, truth: Sequence[int], spoiled: float, vocab_size: int) -> None:
        self._truth = truth
        self._spoiled = spoiled
        self._vocab_size = vocab_size

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        random = np.random.default_rng(context.generated)
        tokens: list[int] = []
        parents: list[int] = []
        claims: list[float] = []
        parent, above = ROOT, 1.0
        for right in self._truth[context.generated :]:
            wrong = random.integers(0, self._vocab_size, size=3).tolist()
            siblings = dict.fromkeys([*wrong[:1], right, *wrong[1 : random.integers(1, 4)]])
            if random.random() < self._spoiled:
                del siblings[right]
            first = len(tokens)
            for token in siblings:
                tokens.append(token)
                parents.append(parent)
                claims.append(above * (0.95 if token == right else 0.9))
            if tokens[first] != right:
                tokens.append(right)  # a child of a wrong node: right token, wrong path
                parents.append(first)
                claims.append(0.9 * claims[first])
            if right not in siblings or len(tokens) > budget:
                break
            parent, above = first + list(siblings).index(right), 0.95 * above
        return DraftTree.build(
            tokens[:budget], parents[:budget], NoisyTrees.name, accept_prob=claims[:budget]
        )
