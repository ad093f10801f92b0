"""Coupled drafts: a draft model makes the target's random choices with its own distribution.

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
from torch import Tensor

from ragspec.drafters.base import DraftContext
from ragspec.drafters.model.cache import DraftState, KnownDistribution
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

_CANDIDATES = 8
_CONTENDERS = 64
_ERROR, _LEAST, _MOST = 0.7, 0.1, 3.0
_RATE = 0.1
_TYPICAL = 0.7  # agreement of a first candidate, before its distribution is known
_ROW = 0.2  # cost of one more row in a forward, in forwards; measured on a CPU, less on a GPU


@dataclass(slots=True)
class CandidateNodes:
    """Candidates so far, parents first; slot -1 = not read.

    first: of every node that was read (-1 = root), its first candidate's token and agreement.
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    accept_prob: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, parent: int, tokens: Sequence[float], agreements: Sequence[float]) -> None:
        """Add the choices after a node, first one first, by the chance of agreement of each."""
        self.first[parent] = int(tokens[0]), agreements[0]
        above, depth = (
            (1.0, 0) if parent == ROOT else (self.accept_prob[parent], self.depths[parent])
        )
        for token, agreement in zip(tokens, agreements, strict=True):
            if agreement > 0.0:
                self.tokens.append(int(token))
                self.parents.append(parent)
                self.accept_prob.append(above * agreement)
                self.depths.append(depth + 1)
                self.slots.append(-1)

    def best(self, budget: int) -> list[int]:
        """Return the nodes of largest reach, best first; earlier ones first among equals."""
        accept_prob = self.accept_prob
        return sorted(range(len(accept_prob)), key=accept_prob.__getitem__, reverse=True)[:budget]

    def path(self, node: int) -> list[int]:
        """Return the tokens from below the root to the node."""
        results: list[int] = []
        while node != ROOT:
            results.append(self.tokens[node])
            node = self.parents[node]
        return results[::-1]


class CoupledGrowth:
    """Grows a tree of a draft model's first choices under the target's noise.

    distribution: the target's, without processors that keep state. width: nodes read by one forward
    and candidates per node; 1 gives a chain. error: the scale, in logits, by which the draft's
    distribution is taken to differ from the target's. typical: how often the first candidate is
    right. Both follow what is accepted.
    """

    kind = DraftKind.COUPLED

    def __init__(self, distribution: TokenDistribution, name: str, width: int) -> None:
        self.distribution = distribution
        self.name = name
        self.width = width
        self.error = _ERROR
        self.typical = _TYPICAL
        self._nodes = CandidateNodes()
        self._selection: list[int] = []
        self._known: list[tuple[Sequence[int], Tensor, Tensor]] = []
        self._noise: dict[int, Tensor] = {}
        self._candidates = 1 if width == 1 else max(width, _CANDIDATES)

    def grow(self, draft_state: DraftState) -> DraftTree:
        """Return a tree of first choices on this ground."""
        nodes, budget = self._begin(), draft_state.budget
        cache = draft_state.cache
        past = [index for index in self._noise if index < draft_state.context.generated]
        for index in past:
            del self._noise[index]
        selection = self._rows_selected(budget)
        self._choose(nodes, [ROOT], draft_state.logits, draft_state.context, selection)
        while True:
            selected = self._selection_of(nodes, budget)
            fresh = self._fresh(selected, draft_state)
            if not fresh:
                break
            tokens = [nodes.tokens[i] for i in fresh]
            parents = [nodes.parents[i] for i in fresh]
            above = [ROOT if parent == ROOT else nodes.slots[parent] for parent in parents]
            first = cache.drafted
            logits = cache.extend(tokens, above)
            for slot, node in enumerate(fresh, start=first):
                nodes.slots[node] = slot
            self._choose(nodes, fresh, logits, draft_state.context, selection)
        self._selection = sorted(selected)
        return self._tree()

    def _begin(self) -> CandidateNodes:
        """Forget the last draft; return the nodes of the next, none so far."""
        self._nodes, self._known = CandidateNodes(), []
        return self._nodes

    def _rows_selected(self, budget: int) -> int:
        """Return how many candidates a node gets."""
        return min(self._candidates, max(budget, 1))

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from what the target chose after the nodes of the last draft.

        Stochastic approximation: at rest the first candidates' mean agreement is what it claims.
        """
        nodes, self._nodes = self._nodes, CandidateNodes()
        place = {pair: i for i, pair in enumerate(zip(nodes.parents, nodes.tokens, strict=True))}
        node: int | None = ROOT
        for token in tokens:
            if node is None or node not in nodes.first:
                break
            first, claim = nodes.first[node]
            error = self.error * exp(_RATE * (claim - (token == first)))
            self.error = min(max(error, _LEAST), _MOST)
            self.typical += _RATE * ((token == first) - self.typical)
            node = place.get((node, token))

    def distributions(self) -> list[KnownDistribution]:
        """Return what the last draft knew at the root and at its nodes that were read."""
        place = {node: i for i, node in enumerate(self._selection)} | {ROOT: ROOT}
        results: list[KnownDistribution] = []
        for nodes, tokens, chances in self._known:
            for node, t, c in zip(nodes, tokens.tolist(), chances.tolist(), strict=True):
                if node in place:
                    results.append((place[node], t, c))
        return results

    def _selection_of(self, nodes: CandidateNodes, budget: int) -> list[int]:
        """Return the candidates that stay in the tree, at most `budget`."""
        return nodes.best(budget)

    def _fresh(self, selected: Sequence[int], draft_state: DraftState) -> list[int]:
        """Return the nodes that the next forward reads; none where it promises too little.

        Each node is granted one child; where the budget is used up it displaces the worst node.
        """
        nodes, accept_prob = self._nodes, self._nodes.accept_prob
        fresh = [i for i in selected if nodes.slots[i] < 0 and nodes.depths[i] < draft_state.depth]
        fresh = fresh[: self.width]
        full = len(selected) + len(fresh) - draft_state.budget
        gains = []
        for rank, node in enumerate(fresh):
            displaced = accept_prob[selected[-1 - rank]] if rank < full else 0.0
            gains.append(max(0.0, self.typical * accept_prob[node] - displaced))
        if sum(gains) < draft_state.min_expected_gain:
            return []
        least = _ROW * draft_state.min_expected_gain
        return [node for node, gain in zip(fresh, gains, strict=True) if gain >= least]

    def _choose(
        self,
        nodes: CandidateNodes,
        parents: Sequence[int],
        logits: Tensor,
        context: DraftContext,
        k: int,
    ) -> None:
        """Add the k first choices after each of the nodes whose logits [n, V] these are."""
        distribution = self.distribution
        if distribution.processors:
            logits = distribution.process(
                logits, context.tokens, [nodes.path(node) for node in parents]
            )
        depths = [0 if node == ROOT else nodes.depths[node] for node in parents]
        indices = [context.generated + depth for depth in depths]
        tokens, perturbed = self._contenders(logits, indices)
        chances = agreement(perturbed, distribution.sampling.temperature, self.error)
        self._known.append((parents, tokens, chances))
        for node, row in zip(parents, listed(tokens, chances, k), strict=True):
            nodes.add(node, *row)

    def _contenders(self, logits: Tensor, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the first choices of R nodes, tokens i64 [R, k], and their perturbed logits.

        Those are `log q / T + g`, f64 [R, k], up to a constant of the row; greedy: `log q`.
        """
        distribution, k = self.distribution, min(_CONTENDERS, logits.shape[-1])
        sampling = distribution.sampling
        filtered = sampling.top_k or sampling.top_p < 1.0 or sampling.min_p
        if filtered and not sampling.greedy:
            tokens, p = distribution.best(logits, indices, k)
            return tokens, p.log() + distribution.noise.gumbel_rows(indices, tokens)
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not sampling.greedy:
            noise = self._gumbel(indices, scores)
            scores = torch.add(noise, scores, alpha=1.0 / sampling.temperature)
        values, tokens = scores.topk(k, dim=-1)
        return tokens, values.double()

    def _gumbel(self, indices: Sequence[int], like: Tensor) -> Tensor:
        """Return the noise of the whole vocabulary at R indices [R, V].

        An index is met by every node of its depth and again in the next steps, so noise is kept.
        """
        missing = sorted(set(indices) - self._noise.keys())
        if missing:
            tokens = torch.arange(like.shape[-1], device=like.device)
            noise_rows = self.distribution.noise.gumbel_rows(
                missing, tokens.expand(len(missing), -1)
            )
            self._noise.update(zip(missing, noise_rows.to(like.dtype), strict=True))
        if len(set(indices)) == 1:
            return self._noise[indices[0]]
        return torch.stack([self._noise[index] for index in indices])

    def _tree(self) -> DraftTree:
        nodes, selected = self._nodes, self._selection
        place = {node: i for i, node in enumerate(selected)}
        place[ROOT] = ROOT
        return DraftTree.build(
            [nodes.tokens[i] for i in selected],
            [place[nodes.parents[i]] for i in selected],
            self.name,
            accept_prob=[nodes.accept_prob[i] for i in selected],
            kind=self.kind,
        )


def listed(tokens: Tensor, chances: Tensor, k: int) -> list[tuple[list[float], list[float]]]:
    """Return the first k tokens of each row and their chances, by one copy from the device."""
    rows: list[list[float]] = torch.cat([tokens[:, :k], chances[:, :k]], -1).tolist()
    return [(row[: len(row) // 2], row[len(row) // 2 :]) for row in rows]


def agreement(perturbed: Tensor, temperature: float, error: float) -> Tensor:
    """Return the estimated chance that the target's choice is the same: f64 [R, k].

    perturbed f64 [R, k]: `log q / T + g` of the first choices of R nodes, up to a constant of the
    row; with temperature 0 (greedy) `log q`. If the target's logits differ from the draft's by
    Gumbel errors of scale `error`, the chance is the softmax of T times these over that scale. It
    is taken over the k choices, of which the last should not matter.
    """
    return (perturbed * ((temperature or 1.0) / error)).softmax(-1)
