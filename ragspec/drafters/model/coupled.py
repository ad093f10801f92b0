"""Coupled drafts: a draft model chooses tokens with the target's noise and its own distribution.

The candidates after a node are the first choices of `log q + g`, with the noise g that the target
will use itself. The text is that of plain decoding for every draft (the coupling of Daliri, Musco
and Suresh, arXiv 2408.07978; here with several candidates and in trees). The tree grows best first,
as in EAGLE-2 (arXiv 2406.16858): one forward reads the unread nodes of highest rank, at any depth.
Deviations: EAGLE-2 ranks by q; here the rank is the probability that the target chooses the same
token, see `agreement`. Growth ends when the expected gain of the next forward is too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp

import torch
from torch import Tensor

from ragspec.drafters.base import DraftContext, KnownDistribution
from ragspec.drafters.model.cache import DraftState
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

CONTENDERS = 64  # tokens of a distribution that are compared after each node
_CANDIDATES = 8
_ERROR, _LEAST, _MOST = 0.7, 0.1, 3.0
_RATE = 0.1
_TYPICAL = 0.7  # initial estimate of the first candidates' mean agreement
_ROW = 0.2  # cost of one more row in a forward, in forwards; measured on a CPU, less on a GPU


@dataclass(slots=True)
class CandidateNodes:
    """The candidates of a draft, parents first.

    Attributes:
        slots: Cache slot of each node; -1 for an unread one.
        first: Token and agreement of the first candidate after each read node (-1 = root).
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    accept_prob: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    first: dict[int, tuple[int, float]] = field(default_factory=dict)

    def add(self, parent: int, tokens: Sequence[float], agreements: Sequence[float]) -> None:
        """Add the choices after a node, the first choice first, unless their agreement is 0."""
        self.first[parent] = int(tokens[0]), agreements[0]
        above = 1.0 if parent == ROOT else self.accept_prob[parent]
        depth = 0 if parent == ROOT else self.depths[parent]
        for token, agreement in zip(tokens, agreements, strict=True):
            if agreement > 0.0:
                self.tokens.append(int(token))
                self.parents.append(parent)
                self.accept_prob.append(above * agreement)
                self.depths.append(depth + 1)
                self.slots.append(-1)


class CoupledGrowth:
    """Grows a tree of a draft model's first choices under the target's noise.

    Args:
        distribution: That of the target, without processors that keep state.
        width: Nodes read by one forward, and least number of candidates per node; 1 gives a chain.

    Attributes:
        error: Assumed scale of the difference between the logits of draft and target; adapts to
            acceptance.
        typical: Moving average of how often the first candidate is the target's choice.
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
        """Return a tree of first choices that starts from `draft_state`."""
        nodes = self._nodes = CandidateNodes()
        self._known, budget = [], draft_state.budget
        cache, begin = draft_state.cache, draft_state.context.generated
        self._noise = {index: row for index, row in self._noise.items() if index >= begin}
        candidates = self._candidates_per_node(budget)
        self._choose(nodes, [ROOT], draft_state.logits, draft_state.context, candidates)
        while True:
            selection = self._selection_of(nodes, budget)
            fresh = self._fresh(selection, draft_state)
            if not fresh:
                break
            tokens = [nodes.tokens[i] for i in fresh]
            parents = [nodes.parents[i] for i in fresh]
            above = [ROOT if parent == ROOT else nodes.slots[parent] for parent in parents]
            first = cache.drafted
            logits = cache.extend(tokens, above)
            for slot, node in enumerate(fresh, start=first):
                nodes.slots[node] = slot
            self._choose(nodes, fresh, logits, draft_state.context, candidates)
        self._selection = sorted(selection)
        return self._tree()

    def _candidates_per_node(self, budget: int) -> int:
        return min(self._candidates, max(budget, 1))

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the target's choices after the nodes of the last draft.

        Stochastic approximation of `error`: in equilibrium the first candidates agree as often as
        claimed.
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
        """Return the distributions at the root and at the read nodes of the last draft."""
        place = {node: i for i, node in enumerate(self._selection)} | {ROOT: ROOT}
        return [
            (place[node], t, c)
            for nodes, tokens, chances in self._known
            for node, t, c in zip(nodes, tokens.tolist(), chances.tolist(), strict=True)
            if node in place
        ]

    def _selection_of(self, nodes: CandidateNodes, budget: int) -> list[int]:
        """Return the `budget` candidates of largest `accept_prob`, best first."""
        accept_prob = nodes.accept_prob
        return sorted(range(len(accept_prob)), key=accept_prob.__getitem__, reverse=True)[:budget]

    def _fresh(self, selection: Sequence[int], draft_state: DraftState) -> list[int]:
        """Return the nodes that the next forward reads; none if its expected gain is too small.

        The gain counts one child per node. With a full budget the child displaces the worst node.
        """
        nodes, accept_prob = self._nodes, self._nodes.accept_prob
        fresh = [i for i in selection if nodes.slots[i] < 0 and nodes.depths[i] < draft_state.depth]
        fresh = fresh[: self.width]
        full = len(selection) + len(fresh) - draft_state.budget
        gains = []
        for rank, node in enumerate(fresh):
            displaced = accept_prob[selection[-1 - rank]] if rank < full else 0.0
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
        """Add the k first choices after each of n nodes, given their logits [n, V]."""
        distribution = self.distribution
        if distribution.processors:
            paths = [path_tokens(nodes.tokens, nodes.parents, node) for node in parents]
            logits = distribution.process(logits, context.tokens, paths)
        depths = [0 if node == ROOT else nodes.depths[node] for node in parents]
        indices = [context.generated + depth for depth in depths]
        tokens, perturbed = self._contenders(logits, indices)
        chances = agreement(perturbed, distribution.sampling.temperature, self.error)
        self._known.append((parents, tokens, chances))
        for node, row in zip(parents, listed(tokens, chances, k), strict=True):
            nodes.add(node, *row)

    def _contenders(self, logits: Tensor, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the first choices i64 [R, k] after R nodes, and their perturbed logits f64 [R, k].

        The logits are `log q / T + g`, or `log q` if greedy, up to a constant per row.
        """
        distribution, k = self.distribution, min(CONTENDERS, logits.shape[-1])
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

        The noise is cached: all nodes of a depth and the next steps use the same index.
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
        nodes, selection = self._nodes, self._selection
        place = {node: i for i, node in enumerate(selection)} | {ROOT: ROOT}
        return DraftTree.build(
            [nodes.tokens[i] for i in selection],
            [place[nodes.parents[i]] for i in selection],
            self.name,
            accept_prob=[nodes.accept_prob[i] for i in selection],
            kind=self.kind,
        )


def listed(tokens: Tensor, chances: Tensor, k: int) -> list[tuple[list[float], list[float]]]:
    """Return the first k tokens of each row and their chances with one copy from the device."""
    rows: list[list[float]] = torch.cat([tokens[:, :k], chances[:, :k]], -1).tolist()
    return [(row[: len(row) // 2], row[len(row) // 2 :]) for row in rows]


def path_tokens(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """Return the draft tokens from below the root to the node."""
    path: list[int] = []
    while node != ROOT:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]


def agreement(perturbed: Tensor, temperature: float, error: float) -> Tensor:
    """Return the estimated probability that the target chooses each token, f64 [R, k].

    If the target's logits differ from the draft's by Gumbel errors of scale `error`, it is the
    softmax of T times `perturbed` over that scale. The softmax is over the k choices, of which the
    last should not matter.

    Args:
        perturbed: `log q / T + g` of the first choices after R nodes, f64 [R, k], up to a constant
            per row; `log q` for temperature 0 (greedy).
    """
    return (perturbed * ((temperature or 1.0) / error)).softmax(-1)
