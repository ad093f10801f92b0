"""Coupled drafts: a draft model chooses tokens with the target's noise and its own distribution.

The candidates after a node are the first choices of `log q + g`, with the noise g that the target
will use itself. The text is that of plain decoding for every draft (the coupling of Daliri, Musco
and Suresh, arXiv 2408.07978; here with several candidates and in trees). The tree grows best first,
as in EAGLE-2 (arXiv 2406.16858): one forward reads the unread nodes of highest rank, at any depth.
Deviations: EAGLE-2 ranks by q; here the rank is the probability that the target chooses the same
token, see `agreement`. Growth ends when the expected gain of the next forward is too small.
"""

from collections.abc import Sequence
from math import exp

import torch
from torch import Tensor

from ragspec.drafters.base import NodeChances
from ragspec.drafters.model.growth import CONTENDERS, DraftNodes, DraftState, Growth
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import ROOT, DraftKind

Rows = list[tuple[list[float], list[float]]]  # tokens and their chances, best first
_CANDIDATES = 8
_ERROR, _LEAST, _MOST = 0.7, 0.1, 3.0
_RATE = 0.1
_TYPICAL = 0.7  # initial estimate of the first candidates' mean agreement
_ROW = 0.2  # cost of one more row in a forward, in forwards; measured on a CPU, less on a GPU


class CoupledGrowth(Growth):
    """Grows a tree of a draft model's first choices under the target's noise.

    Args:
        width: Nodes read by one forward, and least number of candidates per node; 1 gives a chain.

    Attributes:
        error: Assumed scale of the difference between the logits of draft and target; adapts to
            acceptance.
        typical: Moving average of how often the first candidate is the target's choice.
    """

    def __init__(
        self, distribution: TokenDistribution, name: str, width: int, kind: DraftKind
    ) -> None:
        super().__init__(distribution, name, kind)
        self.width, self.error, self.typical = width, _ERROR, _TYPICAL
        self._first: dict[int, tuple[int, float]] = {}  # first candidate and its agreement
        self._known: list[tuple[Sequence[int], Tensor, Tensor]] = []
        self._noise: dict[int, Tensor] = {}
        self._candidates = 1 if width == 1 else max(width, _CANDIDATES)
        self._filtered = distribution.sampling.filtered and not distribution.sampling.greedy
        self.whole = bool(distribution.processors) or self._filtered

    def _begin(self, draft_state: DraftState) -> None:
        super()._begin(draft_state)
        self._first, self._known = {}, []
        begin = draft_state.context.generated
        self._noise = {index: row for index, row in self._noise.items() if index >= begin}

    def _expand(self, parents: Sequence[int], logits: Tensor) -> None:
        indices = [self._draft.context.generated + self._nodes.depth(node) for node in parents]
        ids = None if self.whole else self._draft.cache.tokens
        tokens, perturbed = self._contenders(logits, indices, ids)
        chances = agreement(perturbed, self.distribution.sampling.temperature, self.error)
        self._add(parents, tokens, chances, listed(tokens, chances, self._candidates))

    def _add(self, parents: Sequence[int], tokens: Tensor, chances: Tensor, rows: Rows) -> None:
        """Add children of R nodes, given the choices after each [R, k], and the first as `rows`."""
        self._known.append((parents, tokens, chances))
        for parent, (best, claims) in zip(parents, rows, strict=True):
            self._first[parent] = int(best[0]), claims[0]
            ranks = self._ranks(parent, claims)
            self._nodes.add(parent, [int(best[rank]) for rank in ranks], [claims[r] for r in ranks])

    def _ranks(self, parent: int, chances: Sequence[float]) -> Sequence[int]:
        """Return the ranks of the choices that become children: all unless their agreement is 0."""
        return [rank for rank, chance in enumerate(chances) if chance > 0.0]

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the target's choices after the nodes of the last draft.

        Stochastic approximation of `error`: in equilibrium the first candidates agree as often as
        claimed.
        """
        nodes, self._nodes = self._nodes, DraftNodes()
        first, self._first = self._first, {}
        place = {pair: i for i, pair in enumerate(zip(nodes.parents, nodes.tokens, strict=True))}
        node: int | None = ROOT
        for token in tokens:
            if node is None or node not in first:
                break
            best, claim = first[node]
            error = self.error * exp(_RATE * (claim - (token == best)))
            self.error = min(max(error, _LEAST), _MOST)
            self.typical += _RATE * ((token == best) - self.typical)
            node = place.get((node, token))

    def distributions(self) -> list[NodeChances]:
        """Return the distributions at the root and at the read nodes of the last draft."""
        place = {node: i for i, node in enumerate(self._selection)} | {ROOT: ROOT}
        return [
            (place[node], t, c)
            for nodes, tokens, chances in self._known
            for node, t, c in zip(nodes, tokens.tolist(), chances.tolist(), strict=True)
            if node in place
        ]

    def _unread(self) -> list[int]:
        """Return the nodes that the next forward reads; none if its expected gain is too small.

        The gain counts one child per node. With a full budget the child displaces the worst node.
        """
        draft, nodes, accept_prob = self._draft, self._nodes, self._nodes.accept_prob
        budget = draft.budget
        selection = sorted(range(len(nodes)), key=accept_prob.__getitem__, reverse=True)[:budget]
        self._selection = sorted(selection)
        fresh = [i for i in selection if nodes.slots[i] < 0 and nodes.depths[i] < draft.depth]
        fresh = fresh[: self.width]
        full = len(selection) + len(fresh) - budget
        gains = []
        for rank, node in enumerate(fresh):
            displaced = accept_prob[selection[-1 - rank]] if rank < full else 0.0
            gains.append(max(0.0, self.typical * accept_prob[node] - displaced))
        if sum(gains) < draft.min_expected_gain:
            return []
        least = _ROW * draft.min_expected_gain
        return [node for node, gain in zip(fresh, gains, strict=True) if gain >= least]

    def _contenders(
        self, logits: Tensor, indices: Sequence[int], ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the first choices i64 [R, k] after R nodes, and their perturbed logits f64 [R, k].

        The logits are `log q / T + g`, or `log q` if greedy, up to a constant per row.

        Args:
            ids: The tokens that have logits; None for all.
        """
        distribution, k = self.distribution, min(CONTENDERS, logits.shape[-1])
        sampling = distribution.sampling
        if self._filtered:
            return distribution.best(logits, indices, k)
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if not sampling.greedy:
            noise = self._gumbel(indices, scores, ids)
            scores = torch.add(noise, scores, alpha=1.0 / sampling.temperature)
        values, tokens = scores.topk(k, dim=-1)
        return tokens if ids is None else ids[tokens], values.double()

    def _gumbel(self, indices: Sequence[int], like: Tensor, ids: Tensor | None) -> Tensor:
        """Return the noise of the tokens with logits at R indices [R, v].

        The noise is cached: all nodes of a depth and the next steps use the same index.
        """
        missing = sorted(set(indices) - self._noise.keys())
        if missing:
            tokens = torch.arange(like.shape[-1], device=like.device) if ids is None else ids
            noise_rows = self.distribution.noise.gumbel(missing, tokens.expand(len(missing), -1))
            self._noise.update(zip(missing, noise_rows.to(like.dtype), strict=True))
        if len(set(indices)) == 1:
            return self._noise[indices[0]]
        return torch.stack([self._noise[index] for index in indices])


def listed(tokens: Tensor, chances: Tensor, k: int) -> Rows:
    """Return the first k tokens of each row and their chances with one copy from the device."""
    rows: list[list[float]] = torch.cat([tokens[:, :k], chances[:, :k]], -1).tolist()
    return [(row[: len(row) // 2], row[len(row) // 2 :]) for row in rows]


def agreement(perturbed: Tensor, temperature: float, error: float) -> Tensor:
    """Return the estimated probability that the target chooses each token, f64 [R, k].

    If the target's logits differ from the draft's by Gumbel errors of scale `error`, it is the
    softmax of T times `perturbed` over that scale. The softmax is over the k choices, of which the
    last should not matter.

    Args:
        perturbed: See `CoupledGrowth._contenders`.
    """
    return (perturbed * ((temperature or 1.0) / error)).softmax(-1)
