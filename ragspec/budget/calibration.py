"""What drafters claim against what the target accepts: reach corrected while running.

A drafter's `accept_prob` is a claim. Divided by the reach of its parent it claims that the node is
accepted once its parent is. That claim is corrected by how claims of its kind fared:
- by source, rank among siblings, and size of the claim (which stands for the length of a match
  where a source copies);
- for first-ranked children, by the token after which they stand: copies end with sentences (of
  sampled drafts at the root only: what is kept of one may not hang on the tokens drawn).
Old evidence fades. What was tried and brought nothing: which sources agree on a node, its depth,
what whole trees of such claims came to, and how a source's claims of all kinds fared.

Only children of nodes that the text visited count. They are the ones of which the outcome is
known whatever was verified, so the estimate is unbiased; and since the emitted tokens decide,
a draft that was cut or not verified at all teaches as much as one that was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.trees.draft_tree import SAMPLED_KINDS, DraftTree

EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97)  # of claims; near 1 they tell long copies apart
RANKS = 3  # siblings that are told apart: the first, the second, all others
KINDS = tuple(rank * (len(EDGES) + 1) for rank in range(RANKS))  # the first key of each rank
AFTER = RANKS * (len(EDGES) + 1)  # the first key of a token before, behind those of each kind
MOST_RATIOS = 8192  # kept for a source
PRIOR = 3.0  # observations that a claim itself is worth; twice as many after a token
DECAY = 0.98  # weight of the past at every observation of a ratio
UNKNOWN = -1  # the token before the root where it is not told


@dataclass(slots=True)
class AcceptanceRatio:
    """Accepted over claimed: fading counts, and the correction of a claim that follows from them.

    factor <= 1 scales the claim down; factor in (1, 2] scales the distance from 1 down by
    2 - factor. Either way larger claims stay larger.
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

    def learn(self, claim: float, hit: bool, prior: float) -> None:
        """Add one outcome, and turn the mean claim into the mean of the Beta posterior.

        prior: observations that the claim is worth.
        """
        self.trials = self.trials * DECAY + 1.0
        self.claimed = self.claimed * DECAY + claim
        self.accepted = self.accepted * DECAY + hit
        mean = self.claimed / self.trials
        result = (self.accepted + prior * mean) / (self.trials + prior)
        if result <= mean:
            self.factor = result / mean if mean > 0.0 else 1.0
        elif mean < 1.0:
            self.factor = min(2.0, 2.0 - (1.0 - result) / (1.0 - mean))


@dataclass(slots=True)
class Appraisal:
    """A proposed tree with its corrected reach [N], kept until its outcome is known.

    claims: of each node the table of its source, the key of its kind, the claim, the key of the
    token before (None: not asked), and the claim as the kind corrects it.
    """

    tokens: list[int]
    parents: list[int]
    accept_prob: list[float] = field(default_factory=list)
    claims: list[tuple[dict[int, AcceptanceRatio], int, float, int | None, float]] = field(
        default_factory=list
    )


@dataclass(slots=True)
class Calibration:
    """Acceptance by source and kind of claim; tables: by source, the ratios by key."""

    tables: dict[str, dict[int, AcceptanceRatio]] = field(default_factory=dict)

    def appraise(self, tree: DraftTree, root: int = UNKNOWN) -> Appraisal:
        """Return the corrected reach of every node; never more than the reach of its parent.

        root: the last committed token. One pass over plain lists: at the sizes of a draft this
        beats array operations.
        """
        tables = [self.tables.setdefault(name, {}) for name in tree.sources]
        claimed = tree.accept_prob.tolist()
        new = Appraisal(tree.tokens.tolist(), tree.parents.tolist())
        tokens, accept_prob, claims, sample = (
            new.tokens,
            new.accept_prob,
            new.claims,
            tree.kind in SAMPLED_KINDS,
        )
        ranks = [0] * (len(claimed) + 1)  # the last entry is that of the root, -1
        for parent, claim, source in zip(new.parents, claimed, tree.source.tolist(), strict=True):
            above, before, rank, table = 1.0, root, ranks[parent], tables[source]
            if parent >= 0:
                above, before = accept_prob[parent], tokens[parent]
                claim = claim / claimed[parent] if claimed[parent] > 0.0 else 0.0
            ranks[parent] = rank + 1
            if not 0.0 <= claim < 1.0:  # NaN too: a claim of nothing
                claim = 1.0 if claim >= 1.0 else 0.0
            key = KINDS[rank if rank < RANKS else -1] + bisect_right(EDGES, claim)
            known, end = table.get(key), None
            value = corrected = known.apply(claim) if known else claim
            if rank == 0 and before >= 0 and (parent < 0 or not sample):
                end = AFTER + before
                known = table.get(end)
                corrected = known.apply(value) if known else value
            claims.append((table, key, claim, end, value))
            accept_prob.append(above * corrected)
        return new

    def learn(self, appraisal: Appraisal, tokens: Sequence[int]) -> int:
        """Count the outcome of every child of a visited node; `tokens` are what was emitted.

        Returns how many nodes of the proposal the text followed.
        """
        visited, most = {-1: 0}, len(tokens)
        for node, parent in enumerate(appraisal.parents):
            depth = visited.get(parent, most)
            if depth >= most:
                continue
            hit = appraisal.tokens[node] == tokens[depth]
            if hit:
                visited[node] = depth + 1
            table, key, claim, end, value = appraisal.claims[node]
            _learn(table, key, claim, hit, PRIOR)
            if end is not None:
                _learn(table, end, value, hit, 2.0 * PRIOR)
        return len(visited) - 1


def _learn(
    table: dict[int, AcceptanceRatio], key: int, claim: float, hit: bool, prior: float
) -> None:
    """Add one outcome to the ratio of a key; where there is no room for a new one, to none.

    Texts at once must share one, so the first that is set stays.
    """
    known = table.get(key)
    if known is None:
        if len(table) >= MOST_RATIOS:
            return
        known = table.setdefault(key, AcceptanceRatio())
    known.learn(claim, hit, prior)
