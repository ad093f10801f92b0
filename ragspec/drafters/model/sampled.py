"""Sampled drafts: tokens drawn from a draft model's distribution q, for rejection rules.

For comparison with papers; `coupled` accepts more in all but the narrowest drafts. The shape of
the tree is set before the first draw, and `accept_prob` depends only on the position in it: to drop
or move a node because of its token would bias the text. Nodes are in the order of their draws. The
noise is keyed by the index of the root and the number of the node, so no two draws share a random
number, within a step or between steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.drafters.base import KnownDistribution
from ragspec.drafters.model.cache import DraftState
from ragspec.drafters.model.coupled import CONTENDERS, path_tokens
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

_ACCEPT_PROB, _NEXT_ACCEPT_PROB = 0.8, 0.5


class SampledGrowth:
    """Draws a tree from a draft model's distribution q and keeps q for the rule.

    Args:
        distribution: That of the target, without processors that keep state; q has its processors.
        widths: Children of each node by depth, 1 beyond its end: (k,) makes k independently drawn
            chains, (k, k) a tree.
        kind: SAMPLED (siblings are independent draws and may be equal), or
            SAMPLED_WITHOUT_REPLACEMENT (each sibling is drawn from q without the earlier ones).
    """

    def __init__(
        self, distribution: TokenDistribution, name: str, widths: Sequence[int], kind: DraftKind
    ) -> None:
        self.distribution = distribution
        self.name = name
        self.widths = tuple(widths)
        self.kind = kind
        self._samples: SampledNodes | None = None

    def grow(self, draft_state: DraftState) -> DraftTree:
        """Return a tree of draws that starts from `draft_state`."""
        sample = self._samples = SampledNodes(draft_state)
        logits, budget = draft_state.logits, draft_state.budget
        noise, root = self.distribution.noise, draft_state.context.generated
        level = [ROOT]
        for above in range(draft_state.depth):
            width = self.widths[above] if above < len(self.widths) else 1
            first, room = len(sample.tokens), budget - len(sample.tokens)
            parents = level[: -(-room // width)]
            if not parents:
                break
            if above:
                logits = sample.read(parents)
            processed = parents if self.distribution.processors else ()
            paths = [path_tokens(sample.tokens, sample.parents, node) for node in processed]
            scores = self.distribution.process(logits, draft_state.context.tokens, paths)
            q = self.distribution.probabilities(scores).cpu()  # f64 [R, V], after R parents
            for parent, distribution in zip(parents, q, strict=True):
                node = len(sample.tokens)
                count = min(width, budget - node)
                if self.kind is DraftKind.SAMPLED:
                    tokens = draw_independent(noise, root, distribution, range(node, node + count))
                else:
                    tokens = draw_distinct(noise, root, distribution, parent, count)
                sample.add(parent, distribution, tokens)
            level = list(range(first, len(sample.tokens)))
        return sample.tree(self.name, self.kind)

    def learn(self, tokens: Sequence[int]) -> None:
        """Do nothing: a shape that depends on the text might bias it."""

    def distributions(self) -> list[KnownDistribution]:
        """Return the distributions at the root and at the read nodes of the last draft."""
        entries: list[KnownDistribution] = []
        for node, q in self._samples.distributions.items() if self._samples else ():
            chances, tokens = q.topk(min(CONTENDERS, len(q)))
            entries.append((node, tokens.tolist(), chances.tolist()))
        return entries


def draw_independent(noise: NoiseStream, root: int, q: Tensor, nodes: Sequence[int]) -> list[int]:
    """Return one draw from q f64 [V] for each of the nodes, by inversion.

    Args:
        root: Generated index of the first token of the step.
        nodes: Node numbers, which key the noise.
    """
    numbers = [noise.uniform(root, NoiseUse.DRAFT, node) for node in nodes]
    bounds = q.cumsum(0)
    total = bounds[-1]
    at = torch.tensor(numbers, dtype=torch.float64) * total
    # Rounding may lift a number to the total, which belongs to no token.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(bounds, at, right=True).tolist()
    return tokens


def draw_distinct(noise: NoiseStream, root: int, q: Tensor, parent: int, k: int) -> list[int]:
    """Return up to k draws from q f64 [V] without replacement, first draw first.

    The k largest of log q + g, in falling order, are such draws.

    Args:
        root: Generated index of the first token of the step.
        parent: Parent of the drawn nodes (-1 = root), which keys the noise.
    """
    size = len(q)
    lanes = torch.arange(size) + (parent + 1) * size
    scores = q.log() + noise.gumbel(root, lanes, NoiseUse.DRAFT)
    best, tokens = torch.topk(scores, min(k, size))
    drafted: list[int] = tokens[best > float("-inf")].tolist()
    return drafted


class SampledNodes:
    """The nodes of a growing sampled draft; those with the same path share one cache slot."""

    def __init__(self, draft_state: DraftState) -> None:
        self.cache = draft_state.cache
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.accept_prob: list[float] = []
        self.distributions: dict[int, Tensor] = {}
        self._slots: dict[int, int] = {ROOT: ROOT}

    def add(self, parent: int, q: Tensor, tokens: Sequence[int]) -> None:
        """Add the children of a node and their distribution q."""
        self.distributions[parent] = q
        accept_prob = _ACCEPT_PROB * (1.0 if parent == ROOT else self.accept_prob[parent])
        for token in tokens:
            self.tokens.append(token)
            self.parents.append(parent)
            self.accept_prob.append(accept_prob)
            accept_prob *= _NEXT_ACCEPT_PROB

    def read(self, nodes: Sequence[int]) -> Tensor:
        """Read R nodes with the model; return their logits [R, V]."""
        texts = [(self._slots[self.parents[node]], self.tokens[node]) for node in nodes]
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        first = self.cache.drafted
        logits = self.cache.extend([t for _, t in distinct], [above for above, _ in distinct])
        for node, text in zip(nodes, texts, strict=True):
            self._slots[node] = first + distinct[text]
        if len(distinct) == len(nodes):
            return logits
        return logits[torch.tensor([distinct[text] for text in texts], device=logits.device)]

    def tree(self, name: str, kind: DraftKind) -> DraftTree:
        """Return the draft tree with its distributions q."""
        size = self.cache.vocab_size
        q = torch.zeros(len(self.tokens) + 1, size, dtype=torch.float64)
        for node, distribution in self.distributions.items():
            q[node + 1] = distribution
        return DraftTree.build(
            self.tokens, self.parents, name, accept_prob=self.accept_prob, kind=kind, q=q
        )
