"""Calibration of acceptance probabilities while running: claims of drafters against outcomes.

A drafter's `accept_prob` is a claim. Divided by that of the parent, it claims that the node is
accepted once its parent is. This claim is corrected by how claims of its kind fared:
- by source, rank among siblings, and size of the claim (which stands for the length of a match
  if the source copies);
- for first-ranked children, by the token before them: copies end with sentences. In sampled drafts
  at the root only, as the choice of nodes to keep may not depend on the sampled tokens;
- by source in this text: equal claims hold in a quotation and fail in a chat.
Old evidence fades. Only children of nodes that the text visited count. Their outcome is known
whatever was verified, so the estimate is unbiased. The emitted tokens decide, so a draft that was
cut or not verified at all teaches as much as a verified one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.trees.draft_tree import SAMPLED_KINDS, DraftTree

EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97)  # bins of claims; near 1 they separate long copies
RANKS = 3  # classes of siblings: the first, the second, all others
KINDS = tuple(rank * (len(EDGES) + 1) for rank in range(RANKS))  # the first key of each rank
AFTER = RANKS * (len(EDGES) + 1)  # key of token 0 as the token before; greater than those of kinds
MOST_RATIOS = 8192  # per source
PRIOR = 3.0  # weight of the claim itself, in observations; twice as much after a token
TEXT_PRIOR = 4.0  # likewise, of a claim in one text
DECAY = 0.98  # weight of the past at every observation of a ratio
UNKNOWN = -1  # the last committed token if it is unknown


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

    def learn(self, claim: float, hit: bool, prior: float) -> None:
        """Add one outcome, and turn the mean claim into the mean of the Beta posterior.

        Args:
            prior: Weight of the claim, in observations.
        """
        self.trials = self.trials * DECAY + 1.0
        self.claimed = self.claimed * DECAY + claim
        self.accepted = self.accepted * DECAY + hit
        mean = self.claimed / self.trials
        posterior = (self.accepted + prior * mean) / (self.trials + prior)
        if posterior <= mean:
            self.factor = posterior / mean if mean > 0.0 else 1.0
        elif mean < 1.0:
            self.factor = min(2.0, 2.0 - (1.0 - posterior) / (1.0 - mean))


@dataclass(slots=True)
class Appraisal:
    """A proposed tree with its corrected acceptance probabilities [N], until its outcome is known.

    Attributes:
        claims: For each node the table of its source, the key of its kind, the claim, the key of
            the token before (None if unused), and the claim as corrected by kind.
        in_text: For each node the ratio of its source in this text, and the claim corrected before.
    """

    tokens: list[int]
    parents: list[int]
    accept_prob: list[float] = field(default_factory=list)
    claims: list[tuple[dict[int, AcceptanceRatio], int, float, int | None, float]] = field(
        default_factory=list
    )
    in_text: list[tuple[AcceptanceRatio, float]] = field(default_factory=list)


@dataclass(slots=True)
class Calibration:
    """Acceptance by source and kind of claim.

    Attributes:
        tables: For each source, its ratios by key.
    """

    tables: dict[str, dict[int, AcceptanceRatio]] = field(default_factory=dict)

    def appraise(
        self, tree: DraftTree, root: int = UNKNOWN, text: dict[str, AcceptanceRatio] | None = None
    ) -> Appraisal:
        """Return the tree's corrected probabilities, none of them above that of its parent.

        One pass over plain lists: at the sizes of a draft this beats array operations.

        Args:
            root: The last committed token.
            text: The ratios of sources in this text, to which new sources are added.
        """
        tables = [self.tables.setdefault(name, {}) for name in tree.sources]
        text = {} if text is None else text
        in_text = [text.setdefault(name, AcceptanceRatio()) for name in tree.sources]
        claimed = tree.accept_prob.tolist()
        tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
        sampled = tree.kind in SAMPLED_KINDS
        appraisal = Appraisal(tokens, parents)
        accept_prob, claims = appraisal.accept_prob, appraisal.claims
        ranks = [0] * (len(claimed) + 1)  # the last entry is that of the root, -1
        for parent, claim, source in zip(parents, claimed, tree.source.tolist(), strict=True):
            above, before, rank, table = 1.0, root, ranks[parent], tables[source]
            if parent >= 0:
                above, before = accept_prob[parent], tokens[parent]
                claim = claim / claimed[parent] if claimed[parent] > 0.0 else 0.0
            ranks[parent] = rank + 1
            if not 0.0 <= claim < 1.0:  # NaN too: a claim of nothing
                claim = 1.0 if claim >= 1.0 else 0.0
            key = KINDS[rank if rank < RANKS else -1] + bisect_right(EDGES, claim)
            ratio, end = table.get(key), None
            value = corrected = ratio.apply(claim) if ratio else claim
            if rank == 0 and before >= 0 and (parent < 0 or not sampled):
                end = AFTER + before
                ratio = table.get(end)
                corrected = ratio.apply(value) if ratio else value
            claims.append((table, key, claim, end, value))
            appraisal.in_text.append((in_text[source], corrected))
            accept_prob.append(above * in_text[source].apply(corrected))
        return appraisal

    def learn(self, appraisal: Appraisal, tokens: Sequence[int]) -> int:
        """Learn from the emitted tokens; return how many nodes of the tree they followed.

        Every child of a visited node is one outcome.
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
            ratio, corrected = appraisal.in_text[node]
            ratio.learn(corrected, hit, TEXT_PRIOR)
            _learn(table, key, claim, hit, PRIOR)
            if end is not None:
                _learn(table, end, value, hit, 2.0 * PRIOR)
        return len(visited) - 1


def _learn(
    table: dict[int, AcceptanceRatio], key: int, claim: float, hit: bool, prior: float
) -> None:
    """Add one outcome to the ratio of a key, unless the ratio is new and the table is full."""
    ratio = table.get(key)
    if ratio is None:
        if len(table) >= MOST_RATIOS:
            return
        ratio = table.setdefault(key, AcceptanceRatio())  # of concurrent texts, the first one's
    ratio.learn(claim, hit, prior)
