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
from math import exp

import torch

from ragspec.draft import ROOT, DraftContext, DraftKind, DraftTree
from ragspec.draft_cache import DraftCache
from ragspec.law import TokenLaw

_CANDIDATES = 8
_CONTENDERS = 64
_ERROR, _LEAST, _MOST = 0.7, 0.1, 3.0
_RATE = 0.1
_TYPICAL = 0.7  # agreement of a first candidate, before its law is known


@dataclass(slots=True)
class _Nodes:
    """Candidates so far, parents first; slot -1 = not read.

    first: of every node that was read (-1 = root), its first candidate's token and agreement.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    reach: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, parent: int, tokens: Sequence[float], agreements: Sequence[float]) -> None:
        self.first[parent] = int(tokens[0]), agreements[0]
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
    add less than this many accepted nodes. error: the scale, in logits, by which the draft's law is
    taken to differ from the target's; it follows what is accepted.
    """

    kind = DraftKind.COUPLED

    def __init__(self, law: TokenLaw, name: str, width: int, worth: float) -> None:
        self.law = law
        self.name = name
        self.width = width
        self.worth = worth
        self.error = _ERROR
        self._nodes = _Nodes()
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
        nodes = self._nodes = _Nodes()
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

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from what the target chose after the nodes of the last draft.

        Stochastic approximation: at rest the first candidates' mean agreement is what it claims.
        """
        nodes, self._nodes = self._nodes, _Nodes()
        place = {pair: i for i, pair in enumerate(zip(nodes.parents, nodes.tokens, strict=True))}
        node: int | None = ROOT
        for token in tokens:
            if node is None or node not in nodes.first:
                break
            first, claim = nodes.first[node]
            error = self.error * exp(_RATE * (claim - (token == first)))
            self.error = min(max(error, _LEAST), _MOST)
            node = place.get((node, token))

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
        tokens, p = law.best(logits, indices, min(_CONTENDERS, logits.shape[-1]))
        agreements = agreement(law, indices, tokens, p, self.error)[:, :k]
        rows: list[list[float]] = torch.cat([tokens[:, :k], agreements], -1).tolist()
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
    law: TokenLaw, indices: Sequence[int], tokens: torch.Tensor, p: torch.Tensor, error: float
) -> torch.Tensor:
    """Return the estimated chance that the target's choice is the same: f64 [R, k].

    tokens i64 [R, k] and their probabilities f64 [R, k] are the first choices of R nodes. If the
    target's logits differ from the draft's by Gumbel errors of scale `error`, the chance is the
    softmax of the perturbed logits `log q + T g` over that scale, at temperature T (0 = greedy).
    It is taken over the k choices, of which the last should not matter.
    """
    scores = p.log()
    if not law.sampling.greedy:
        scores += law.noise.gumbel_rows(indices, tokens)
        scores *= law.sampling.temperature
    return (scores / error).softmax(-1)
