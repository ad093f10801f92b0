"""Calibration of acceptance probabilities while running: claims of drafters against outcomes.

A drafter's `accept_prob` is a claim. Divided by that of the parent, it claims that the node is
accepted once its parent is. This claim is corrected by how claims of its kind fared: of the same
source, rank among siblings and size, which stands for the length of a match if the source copies.
Old evidence fades. Only children of nodes that the text visited count. Their outcome is known
whatever was verified, so the estimate is unbiased. The emitted tokens decide, so a draft that was
cut or not verified at all teaches as much as a verified one.

Corrections by the token before and by text raised the log loss of claims over recorded drafts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.trees.draft_tree import DraftTree

EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97)  # bins of claims; near 1 they separate long copies
RANKS = 3  # classes of siblings: the first, the second, all others
PRIOR = 3.0  # weight of the claim itself, in observations
DECAY = 0.98  # weight of the past at every observation of a ratio


@dataclass(slots=True)
class AcceptanceRatio:
    """Accepted over claimed, as fading counts, and the correction of a claim that follows.

    Attributes:
        trials, accepted, claimed: Fading sums of outcomes, acceptances and claims.
        factor: At most 1, it scales the claim down; in (1, 2], it scales the distance from 1 down
            by 2 - factor. Either way larger claims stay larger.
    """

    trials: float = 0.0
    accepted: float = 0.0
    claimed: float = 0.0
    factor: float = 1.0

    def apply(self, claim: float) -> float:
        """Return the corrected claim, in [0, 1]."""
        if self.factor <= 1.0:
            return claim * self.factor
        return 1.0 - (1.0 - claim) * (2.0 - self.factor)

    def learn(self, claim: float, hit: bool) -> None:
        """Add one outcome, and turn the mean claim into the mean of the Beta posterior."""
        self.trials = self.trials * DECAY + 1.0
        self.claimed = self.claimed * DECAY + claim
        self.accepted = self.accepted * DECAY + hit
        mean = self.claimed / self.trials
        posterior = (self.accepted + PRIOR * mean) / (self.trials + PRIOR)
        if posterior <= mean:
            self.factor = posterior / mean if mean > 0.0 else 1.0
        elif mean < 1.0:
            self.factor = min(2.0, 2.0 - (1.0 - posterior) / (1.0 - mean))


@dataclass(slots=True)
class Appraisal:
    """A proposed tree with its corrected acceptance probabilities [N], until its outcome is known.

    Attributes:
        claims: For each node the ratio of its kind, and its claim.
    """

    tokens: list[int]
    parents: list[int]
    accept_prob: list[float] = field(default_factory=list)
    claims: list[tuple[AcceptanceRatio, float]] = field(default_factory=list)

    def learn(self, tokens: Sequence[int]) -> int:
        """Learn from the emitted tokens; return how many nodes of the tree they followed.

        Every child of a visited node is one outcome.
        """
        visited, most = {-1: 0}, len(tokens)
        for node, parent in enumerate(self.parents):
            depth = visited.get(parent, most)
            if depth < most:
                hit = self.tokens[node] == tokens[depth]
                if hit:
                    visited[node] = depth + 1
                ratio, claim = self.claims[node]
                ratio.learn(claim, hit)
        return len(visited) - 1


@dataclass(slots=True)
class Calibration:
    """Acceptance by kind of claim.

    Attributes:
        ratios: By source, class of rank, and bin of the claim.
    """

    ratios: dict[tuple[str, int, int], AcceptanceRatio] = field(default_factory=dict)

    def appraise(self, tree: DraftTree) -> Appraisal:
        """Return the tree's corrected probabilities, none of them above that of its parent.

        One pass over plain lists: at the sizes of a draft this beats array operations.
        """
        claimed, ratios, names = tree.accept_prob.tolist(), self.ratios, tree.sources
        appraisal = Appraisal(tree.tokens.tolist(), tree.parents.tolist())
        accept_prob = appraisal.accept_prob
        ranks = [0] * (len(claimed) + 1)  # the last entry is that of the root, -1
        for parent, claim, source in zip(
            appraisal.parents, claimed, tree.source.tolist(), strict=True
        ):
            above, rank = 1.0, ranks[parent]
            if parent >= 0:
                above = accept_prob[parent]
                claim = claim / claimed[parent] if claimed[parent] > 0.0 else 0.0
            ranks[parent] = rank + 1
            if not 0.0 <= claim < 1.0:  # NaN too: a claim of nothing
                claim = 1.0 if claim >= 1.0 else 0.0
            key = names[source], min(rank, RANKS - 1), bisect_right(EDGES, claim)
            # Concurrent texts must share one, so the first that is set stays.
            ratio = ratios.get(key) or ratios.setdefault(key, AcceptanceRatio())
            appraisal.claims.append((ratio, claim))
            accept_prob.append(above * ratio.apply(claim))
        return appraisal
