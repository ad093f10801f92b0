"""Coupled drafts: a draft model makes the target's random choices with its own law.

A node's candidates are the first choices of `log q + g`, with the very noise g by which the target
will choose, so that the text is that of plain decoding whatever was drafted (the coupling of
Daliri, Musco and Suresh, arXiv 2408.07978; here with several candidates and in trees). The tree
grows best first, as in EAGLE-2 (arXiv 2406.16858), which ranks by q: one forward reads the most
promising nodes that were not read yet, wherever they hang. Deviations: a node is ranked by the
chance that the target's choice is the same, see `agreement`; growth ends when the next forward
promises too little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ragspec.draft import ROOT, DraftContext, DraftKind, DraftTree
from ragspec.draft_cache import DraftCache
from ragspec.law import TokenLaw

_CANDIDATES = 8
_TYPICAL = 0.7  # agreement of a first candidate, before its law is known


@dataclass(slots=True)
class _Nodes:
    """Candidates so far, parents first; slot -1 = not read."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)

    def add(self, parent: int, tokens: Sequence[float], agreements: Sequence[float]) -> None:
        above, depth = (1.0, 0) if parent == ROOT else (self.reach[parent], self.depths[parent])
        for token, agreement in zip(tokens, agreements, strict=True):
            if agreement > 0.0:
                self.tokens.append(int(token))
                self.parents.append(parent)
                self.reach.append(above * agreement)
                self.depths.append(depth + 1)
                self.slots.append(-1)

    def best(self, budget: int) -> list[int]:
        """Return the nodes of largest reach, best first; earlier ones first among equals."""
        reach = self.reach
        return sorted(range(len(reach)), key=reach.__getitem__, reverse=True)[:budget]

    def path(self, node: int) -> list[int]:
        found: list[int] = []
        while node != ROOT:
            found.append(self.tokens[node])
            node = self.parents[node]
        return found[::-1]


class CoupledGrowth:
    """Grows a tree of a draft model's first choices under the target's noise.

    law: the target's, without processors that keep state. width: nodes read by one forward and
    candidates per node; 1 gives a chain. worth: growth ends when the next forward is expected to
    add less than this many accepted nodes.
    """

    kind = DraftKind.COUPLED

    def __init__(self, law: TokenLaw, name: str, width: int, worth: float) -> None:
        self.law = law
        self.name = name
        self.width = width
        self.worth = worth
        self._candidates = 1 if width == 1 else max(width, _CANDIDATES)

    def grow(
        self,
        cache: DraftCache,
        logits: torch.Tensor,
        context: DraftContext,
        budget: int,
        depth: int,
    ) -> DraftTree:
        """Return at most `budget` nodes, at most `depth` deep, below the root's logits [1, V]."""
        nodes = _Nodes()
        wanted = min(self._candidates, max(budget, 1))
        self._choose(nodes, [ROOT], logits, context, wanted)
        while True:
            kept = nodes.best(budget)
            fresh = [i for i in kept if nodes.slots[i] < 0 and nodes.depths[i] < depth]
            fresh = fresh[: self.width]
            if not fresh or _gain(nodes.reach, fresh, kept, budget) < self.worth:
                break
            tokens = [nodes.tokens[i] for i in fresh]
            parents = [nodes.parents[i] for i in fresh]
            above = [ROOT if parent == ROOT else nodes.slots[parent] for parent in parents]
            first = cache.drafted
            logits = cache.extend(tokens, above)
            for slot, node in enumerate(fresh, start=first):
                nodes.slots[node] = slot
            self._choose(nodes, fresh, logits, context, wanted)
        return self._tree(nodes, kept)

    def _choose(
        self,
        nodes: _Nodes,
        parents: Sequence[int],
        logits: torch.Tensor,
        context: DraftContext,
        k: int,
    ) -> None:
        """Add the k first choices after each of the nodes whose logits [n, V] these are."""
        law = self.law
        if law.processors:
            logits = law.process(logits, context.tokens, [nodes.path(node) for node in parents])
        depths = [0 if node == ROOT else nodes.depths[node] for node in parents]
        indices = [context.generated + depth for depth in depths]
        tokens, p = law.best(logits, indices, min(k, logits.shape[-1]))
        agreements = agreement(law, indices, tokens, p)
        rows: list[list[float]] = torch.cat([tokens.double(), agreements], -1).tolist()
        for node, row in zip(parents, rows, strict=True):
            half = len(row) // 2
            nodes.add(node, row[:half], row[half:])

    def _tree(self, nodes: _Nodes, kept: Sequence[int]) -> DraftTree:
        kept = sorted(kept)
        place = {node: i for i, node in enumerate(kept)}
        place[ROOT] = ROOT
        return DraftTree.build(
            [nodes.tokens[i] for i in kept],
            [place[nodes.parents[i]] for i in kept],
            self.name,
            reach=[nodes.reach[i] for i in kept],
            kind=self.kind,
        )


def _gain(reach: Sequence[float], fresh: Sequence[int], kept: Sequence[int], budget: int) -> float:
    """Return the reach that a forward over `fresh` may add to the nodes that are kept.

    Each node is granted one child; where the budget is used up it displaces the worst node.
    """
    full = len(kept) + len(fresh) - budget
    gain = 0.0
    for rank, node in enumerate(fresh):
        displaced = reach[kept[-1 - rank]] if rank < full else 0.0
        gain += max(0.0, _TYPICAL * reach[node] - displaced)
    return gain


def agreement(
    law: TokenLaw, indices: Sequence[int], tokens: torch.Tensor, p: torch.Tensor
) -> torch.Tensor:
    """Return the estimated chance that the target's choice is the same: f64 [R, k].

    tokens i64 [R, k] and their probabilities f64 [R, k] are the first choices of R nodes. If the
    target's log-probabilities differ from the draft's by Gumbel errors of scale 1, the chance is
    the softmax of the draft's perturbed scores: q itself when greedy, and `q exp(g)` over its sum
    under noise. Beyond the k choices that sum is left out.
    """
    if law.sampling.greedy:
        return p
    weights = p * law.noise.gumbel_rows(indices, tokens).exp()
    return weights / weights.sum(-1, keepdim=True)
