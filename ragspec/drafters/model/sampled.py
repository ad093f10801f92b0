"""Sampled drafts: tokens drawn from a draft model's distribution q, for rejection rules.

For comparison with papers; `coupled` accepts more in all but the narrowest drafts. The shape of
the tree is set before anything is drawn, and reach is a constant of the place in it: a node that
is left out or moved because of the token that it carries would bias the text. Nodes are in the
order of their draws. The noise is keyed by the index of the root and the number of the node, so
that no number serves two draws, in one step or in two.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.drafters.base import DraftContext
from ragspec.drafters.model.cache import DraftState, KnownDistribution
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream, NoiseUse
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

_ACCEPT_PROB, _NEXT_ACCEPT_PROB = 0.8, 0.5
_CONTENDERS = 64


class SampledGrowth:
    """Draws a tree from a draft model's distribution q and keeps q for the rule.

    distribution: the target's, without processors that keep state; q has all its processors.
    widths: children of each node by depth, 1 beyond its end: (k,) makes k chains that are drawn
    independently, (k, k) a tree. kind: SAMPLED (siblings are independent draws and may be equal) or
    SAMPLED_WITHOUT_REPLACEMENT (each sibling is drawn from what the ones before left of q).
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
        """Return a tree of draws on this ground."""
        sample = self._samples = SampledNodes(draft_state)
        logits, context, budget = draft_state.logits, draft_state.context, draft_state.budget
        level = [ROOT]
        for above in range(draft_state.depth):
            width = self.widths[above] if above < len(self.widths) else 1
            first, room = len(sample.tokens), budget - len(sample.tokens)
            parents = level[: -(-room // width)]
            if not parents:
                break
            if above:
                logits = sample.read(parents)
            q = self._distributions(sample, parents, logits, above)
            for parent, distribution in zip(parents, q, strict=True):
                count = min(width, budget - len(sample.tokens))
                sample.add(
                    parent,
                    distribution,
                    self._draw(context, len(sample.tokens), parent, distribution, count),
                )
            level = list(range(first, len(sample.tokens)))
        return sample.tree(self.name, self.kind)

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn nothing: a shape that follows the text might bias it."""

    def distributions(self) -> list[KnownDistribution]:
        """Return what the last draft knew at the root and at its nodes that were read."""
        if self._samples is None:
            return []
        results: list[KnownDistribution] = []
        for node, q in self._samples.distributions.items():
            chances, tokens = q.topk(min(_CONTENDERS, len(q)))
            results.append((node, tokens.tolist(), chances.tolist()))
        return results

    def _distributions(
        self, sample: SampledNodes, parents: Sequence[int], logits: Tensor, depth: int
    ) -> Tensor:
        """Return q after each of the nodes, f64 [R, V] on the CPU, from their logits [R, V]."""
        paths = [sample.path(parent) for parent in parents] if self.distribution.processors else []
        scores = self.distribution.process(logits, sample.context.tokens, paths)
        return self.distribution.probabilities(scores).cpu()

    def _draw(self, context: DraftContext, first: int, parent: int, q: Tensor, k: int) -> list[int]:
        """Return the tokens of up to k children, numbered from `first` on."""
        noise, root = self.distribution.noise, context.generated
        if self.kind is DraftKind.SAMPLED:
            return draw_independent(noise, root, q, range(first, first + k))
        return draw_distinct(noise, root, q, parent, k)


def draw_independent(noise: NoiseStream, root: int, q: Tensor, nodes: Sequence[int]) -> list[int]:
    """Return one draw from q f64 [V] for each of the nodes, by inversion.

    root: generated index of the first token of the step. Every node has a number of its own.
    """
    numbers = [noise.uniform(root, NoiseUse.DRAFT, node) for node in nodes]
    bounds = q.cumsum(0)
    total = bounds[-1]
    at = torch.tensor(numbers, dtype=torch.float64) * total
    # Rounding may lift a number to the total, behind which there is no token.
    at = torch.minimum(at, torch.nextafter(total, torch.zeros_like(total)))
    tokens: list[int] = torch.searchsorted(bounds, at, right=True).tolist()
    return tokens


def draw_distinct(noise: NoiseStream, root: int, q: Tensor, parent: int, k: int) -> list[int]:
    """Return up to k draws from q f64 [V] without replacement, first draw first.

    The k largest of log q + g, in falling order, are such draws. root: generated index of the
    first token of the step. Every parent (-1 = root) has noise of its own.
    """
    size = len(q)
    lanes = torch.arange(size) + (parent + 1) * size
    scores = q.log() + noise.gumbel(root, lanes, NoiseUse.DRAFT)
    best, tokens = torch.topk(scores, min(k, size))
    result: list[int] = tokens[best > float("-inf")].tolist()
    return result


class SampledNodes:
    """What was drawn so far. Nodes with the same text share one slot of the cache."""

    def __init__(self, draft_state: DraftState) -> None:
        self.cache = draft_state.cache
        self.context = draft_state.context
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.accept_prob: list[float] = []
        self.distributions: dict[int, Tensor] = {}
        self._slots: dict[int, int] = {ROOT: ROOT}

    def add(self, parent: int, q: Tensor, tokens: Sequence[int]) -> None:
        """Add the children of a node and the distribution that they were drawn from."""
        self.distributions[parent] = q
        accept_prob = _ACCEPT_PROB * (1.0 if parent == ROOT else self.accept_prob[parent])
        for token in tokens:
            self.tokens.append(token)
            self.parents.append(parent)
            self.accept_prob.append(accept_prob)
            accept_prob *= _NEXT_ACCEPT_PROB

    def read(self, nodes: Sequence[int]) -> Tensor:
        """Let the model read the nodes; return their logits [R, V], one row for each of them."""
        texts = [(self._slots[self.parents[node]], self.tokens[node]) for node in nodes]
        distinct = {text: row for row, text in enumerate(dict.fromkeys(texts))}
        first = self.cache.drafted
        logits = self.cache.extend([t for _, t in distinct], [above for above, _ in distinct])
        for node, text in zip(nodes, texts, strict=True):
            self._slots[node] = first + distinct[text]
        if len(distinct) == len(nodes):
            return logits
        return logits[torch.tensor([distinct[text] for text in texts], device=logits.device)]

    def path(self, node: int) -> list[int]:
        """Return the draft tokens from below the root to the node."""
        results: list[int] = []
        while node != ROOT:
            results.append(self.tokens[node])
            node = self.parents[node]
        return results[::-1]

    def tree(self, name: str, kind: DraftKind) -> DraftTree:
        """Return the draft with its distributions."""
        size = self.cache.vocab_size
        q = torch.zeros(len(self.tokens) + 1, size, dtype=torch.float64)
        for node, distribution in self.distributions.items():
            q[node + 1] = distribution
        return DraftTree.build(
            self.tokens, self.parents, name, accept_prob=self.accept_prob, kind=kind, q=q
        )
