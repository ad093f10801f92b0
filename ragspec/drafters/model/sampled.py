"""Sampled drafts: tokens drawn from a draft model's distribution q, for rejection rules.

For comparison with papers; `coupled` accepts more in all but the narrowest drafts. The shape of
the tree is set before the first draw, and `accept_prob` depends only on the position in it: to drop
or move a node because of its token would bias the text. Nodes are in the order of their draws. The
noise is keyed by the index of the root and the number of the node, so no two draws share a random
number, within a step or between steps.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ragspec.drafters.base import NodeChances
from ragspec.drafters.model.growth import CONTENDERS, DraftState, Growth
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

_ACCEPT_PROB, _NEXT_ACCEPT_PROB = 0.8, 0.5


class SampledGrowth(Growth):
    """Draws a tree from a draft model's distribution q and keeps q for the rule.

    Args:
        distribution: See `Growth`; q has its processors.
        widths: Children of each node by depth, 1 beyond its end: (k,) makes k independently drawn
            chains, (k, k) a tree.
        kind: SAMPLED (siblings are independent draws and may be equal), or
            SAMPLED_WITHOUT_REPLACEMENT (each sibling is drawn from q without the earlier ones).
    """

    def __init__(
        self, distribution: TokenDistribution, name: str, widths: Sequence[int], kind: DraftKind
    ) -> None:
        super().__init__(distribution, name, kind)
        self.widths = tuple(widths)
        self._q: dict[int, Tensor] = {}
        self._level = 0  # the first of the nodes that were added last

    def _begin(self, draft_state: DraftState) -> None:
        super()._begin(draft_state)
        self._q = {}

    def _width(self, depth: int) -> int:
        """Return the number of children of a node at this depth."""
        return self.widths[depth] if depth < len(self.widths) else 1

    def _expand(self, parents: Sequence[int], logits: Tensor) -> None:
        nodes, noise = self._nodes, self.distribution.noise
        self._level, root = len(nodes), self._draft.context.generated
        width = self._width(nodes.depth(parents[0]))
        q = self.distribution.probabilities(logits).cpu()  # f64 [R, V]
        for parent, distribution in zip(parents, q, strict=True):
            node = len(nodes)
            count = min(width, self._draft.budget - node)
            if self.kind is DraftKind.SAMPLED:
                tokens = draw_independent(noise, root, distribution, range(node, node + count))
            else:
                tokens = draw_distinct(noise, root, distribution, parent, count)
            chances = [_ACCEPT_PROB * _NEXT_ACCEPT_PROB**rank for rank in range(len(tokens))]
            nodes.add(parent, tokens, chances)
            self._q[parent] = distribution

    def _unread(self) -> list[int]:
        count, depth = len(self._nodes), self._nodes.depths[-1]
        self._selection = range(count)
        if depth >= self._draft.depth:
            return []
        room = self._draft.budget - count
        return list(range(self._level, count)[: -(-room // self._width(depth))])

    def distributions(self) -> list[NodeChances]:
        """Return the distributions at the root and at the read nodes of the last draft."""
        entries: list[NodeChances] = []
        for node, q in self._q.items():
            chances, tokens = q.topk(min(CONTENDERS, len(q)))
            entries.append((node, tokens.tolist(), chances.tolist()))
        return entries

    def _tree(self) -> DraftTree:
        q = torch.zeros(len(self._nodes) + 1, len(self._q[ROOT]), dtype=torch.float64)
        for node, distribution in self._q.items():
            q[node + 1] = distribution
        return replace(super()._tree(), q=q)


def draw_independent(noise: NoiseStream, root: int, q: Tensor, nodes: Sequence[int]) -> list[int]:
    """Return one draw from q f64 [V] for each of the nodes, by inversion.

    Args:
        root, nodes: The index of the root and the numbers of the nodes, which key the noise.
    """
    numbers = [noise.uniform(root, NoiseUse.DRAFT, node) for node in nodes]
    bounds = q.cumsum(0)
    total = bounds[-1]
    at = torch.tensor(numbers, dtype=torch.float64) * total
    # Rounding may lift a number to the total, which belongs to no token.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(bounds, at, right=True).tolist()


def draw_distinct(noise: NoiseStream, root: int, q: Tensor, parent: int, k: int) -> list[int]:
    """Return up to k draws from q f64 [V] without replacement, first draw first.

    The k largest of log q + g, in falling order, are such draws.

    Args:
        root, parent: The index of the root and the parent of the nodes, which key the noise.
    """
    size = len(q)
    lanes = torch.arange(size) + (parent + 1) * size
    best, tokens = torch.topk(q.log() + noise.gumbel([root], lanes, NoiseUse.DRAFT), min(k, size))
    return tokens[best > float("-inf")].tolist()
