"""Calibration of acceptance probabilities while running: claims of drafters against outcomes.

A drafter's `accept_prob` is a claim. Divided by that of the parent, it claims that the node is
accepted once its parent is. Its log-odds are shifted by two numbers, learned by logistic regression
step by step: one for claims of its kind in all texts (the same source, rank among siblings and
size, which stands for the length of a match if the source copies), one for all claims in this text.
Only children of nodes that the text visited count. Their outcome is known whatever was verified, so
the estimate is unbiased. The emitted tokens decide, so a draft that was cut or not verified at all
teaches as much as a verified one.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import exp

import numpy as np

from ragspec.trees.draft_tree import DraftTree

EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97)  # bins of claims; near 1 they separate long copies
RANKS = 3  # classes of siblings: the first, the second, all others
SURE = 0.99  # the largest claim that is believed
KIND_RATE, TEXT_RATE = 0.3, 0.4  # learning rates of the shifts

Kind = tuple[str, int, int]
"""Source, class of rank, and bin of a claim."""

Claims = list[tuple[Kind, float]]
"""For each node of a tree the kind of its claim, and the corrected claim."""


@dataclass(slots=True)
class Calibration:
    """The shifts of log-odds in one text.

    Attributes:
        kinds: Those of kinds; all texts share them.
        text: That of this text.
    """

    kinds: dict[Kind, float] = field(default_factory=dict)
    text: float = 0.0

    def appraise(self, tree: DraftTree) -> tuple[DraftTree, Claims]:
        """Return the tree with corrected probabilities, none of them above that of its parent.

        One pass over plain lists: at the sizes of a draft this beats array operations.
        """
        claimed, kinds, names = tree.accept_prob.tolist(), self.kinds, tree.sources
        accept_prob, claims = list[float](), Claims()
        ranks = [0] * (len(claimed) + 1)  # the last entry is that of the root, -1
        nodes = zip(tree.parents.tolist(), claimed, tree.source.tolist(), strict=True)
        for parent, claim, source in nodes:
            above, rank = 1.0, ranks[parent]
            if parent >= 0:
                above = accept_prob[parent]
                claim = claim / claimed[parent] if claimed[parent] > 0.0 else 0.0
            ranks[parent] = rank + 1
            kind = names[source], min(rank, RANKS - 1), bisect_right(EDGES, claim)
            claim = self.shifted(claim, kinds.get(kind, 0.0))
            claims.append((kind, claim))
            accept_prob.append(above * claim)
        return replace(tree, accept_prob=np.asarray(accept_prob, dtype=np.float32)), claims

    def shifted(self, claim: float, kind: float = 0.0) -> float:
        """Return a claim as this text suggests, and its kind if its shift is given."""
        if not 1.0 - SURE < claim < SURE:  # NaN too: a claim of nothing
            claim = SURE if claim >= SURE else 1.0 - SURE
        odds = claim / (1.0 - claim) * exp(self.text + kind)
        return odds / (1.0 + odds)

    def learn(self, tree: DraftTree, claims: Claims, tokens: Sequence[int]) -> int:
        """Learn from the emitted tokens; return how many nodes of the tree they followed.

        Every child of a visited node is one outcome.
        """
        visited, most, kinds = {-1: 0}, len(tokens), self.kinds
        drafted = tree.tokens.tolist()
        for node, parent in enumerate(tree.parents.tolist()):
            depth = visited.get(parent, most)
            if depth < most:
                hit = drafted[node] == tokens[depth]
                if hit:
                    visited[node] = depth + 1
                kind, claim = claims[node]
                kinds[kind] = kinds.get(kind, 0.0) + KIND_RATE * (hit - claim)
                self.text += TEXT_RATE * (hit - claim)
        return len(visited) - 1
