"""The mixture of a kNN language model, its transforms, and the cache that guesses are looked up in.

The keys behind the neighbours of one token are likely neighbours of the next tokens (RaLMSpec,
Zhang et al. 2024, arXiv 2401.14021, section 3: the next n = 10 positions are cached).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.needs import LAST, Needs
from ragspec.retrievers.knn.datastore import Datastore, Neighbours
from ragspec.retrievers.search.nearest import Floats, Numbers
from ragspec.retrievers.search.sparse import largest
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.trees.draft_tree import ROOT, DraftTree

TOGETHER = 16  # nodes of a draft that are searched with the root, in one pass over the keys
AHEAD = 10  # keys behind a neighbour that are cached with it
CACHED = 1 << 14  # most keys of a cache, by default
ADDED = 1 << 11  # most keys added after one search
# Below 1: if processors forbid all tokens of the neighbours, those of the target remain.
MOST_WEIGHT = 1.0 - 1.0 / (1 << 40)


class NeighbourCache:
    """The keys that the searches of one text added last, at most `most`."""

    def __init__(self, store: Datastore, most: int = CACHED) -> None:
        self._store = store
        most = max(1, min(most, len(store)))
        self._keys: Floats = np.zeros((most, store.width), np.float32)
        self._half: Floats = np.zeros(most, np.float32)  # |x|^2 / 2
        self._numbers: Numbers = np.full(most, -1, np.int64)
        self._cached: NDArray[np.bool_] = np.zeros(len(store), np.bool_)
        self._next = 0
        self.size = 0

    def add(self, neighbours: Neighbours) -> None:
        """Add the neighbours of a search and the keys behind them."""
        most = min(ADDED, len(self._numbers))
        following = self._store.following(neighbours.numbers[:most], AHEAD)[:most]
        following = following[np.sort(np.unique(following, return_index=True)[1])]
        new = following[~self._cached[following]]
        if not len(new):
            return
        places = (self._next + np.arange(len(new))) % len(self._numbers)
        gone = self._numbers[places]
        self._cached[gone[gone >= 0]] = False
        self._cached[new] = True
        rows = np.asarray(self._store.keys[new], np.float32)
        self._keys[places], self._numbers[places] = rows, new
        self._half[places] = 0.5 * np.einsum("ij,ij->i", rows, rows)
        self._next = int(places[-1] + 1) % len(self._numbers)
        self.size = min(self.size + len(new), len(self._numbers))

    def nearest(self, state: Floats, k: int) -> Neighbours:
        """Return the k nearest cached keys, measured in float32, which is enough for a guess."""
        scores = self._keys[: self.size] @ state - self._half[: self.size]
        best = largest(scores, k)
        distances = np.maximum(float(state @ state) - 2.0 * scores[best].astype(np.float64), 0.0)
        return Neighbours(self._numbers[best], distances)


@dataclass(frozen=True, slots=True)
class Knn:
    """The mixture of a target's distribution with that of the neighbours in a datastore.

    p = (1 - weight) p_target + weight p_near. p_near gives the token of each neighbour its share of
    softmax(-distance / temperature), with squared distances (Khandelwal et al. 2020, arXiv
    1911.00172, section 2).

    Attributes:
        weight: Weight of the neighbours, 0 to 1.
        temperature: Temperature of squared distances, above 0.
    """

    store: Datastore
    k: int
    weight: float
    temperature: float

    def shares(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of each neighbour, nearest first: [k] -> [k], with a sum of 1."""
        scaled = np.exp((distances[0] - distances) / self.temperature)
        return np.asarray(scaled / scaled.sum())

    def logits(self, logits: Tensor, neighbours: Neighbours) -> Tensor:
        """Return the log of the mixed distribution f64 [1, V] from the target's logits [1, V]."""
        distribution, weight = logits.double().softmax(-1), min(self.weight, MOST_WEIGHT)
        distribution *= 1.0 - weight
        tokens = torch.from_numpy(self.store.values[neighbours.numbers])
        added = torch.from_numpy(weight * self.shares(neighbours.distances))
        # In float64 the order of these few additions does not matter: all devices agree.
        device = distribution.device
        distribution[0].index_add_(0, tokens.to(device), added.to(device))
        return distribution.log()


@dataclass(frozen=True, slots=True, eq=False)
class KnnQuery:
    """A guessed position: hidden state f32 [H], logits [1, V], index of the token that follows."""

    state: Floats
    logits: Tensor
    index: int


class KnnTransform(Transform, RowTransform):
    """The part that both transforms share; each serves one text."""

    name = "knn"
    needs = Needs(hidden_states=(LAST,))

    def __init__(self, knn: Knn) -> None:
        self._knn = knn
        self._states: Floats = np.zeros((0, knn.store.width), np.float32)
        self.distribution: TokenDistribution | None = None

    def open(self, start: TextStart) -> Self:
        """Return the transform itself."""
        self.distribution = start.distribution
        return self

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Store the hidden states [N + 1, H] as float32 on the host."""
        assert states is not None
        self._states = states.float().cpu().numpy()


class Searching(KnnTransform):
    """The transform that defines the text: it searches for the neighbours of every token.

    Args:
        cache: Takes the neighbours, for later guesses.

    Attributes:
        times: Start in seconds, queries and milliseconds of each search.
    """

    def __init__(self, knn: Knn, cache: NeighbourCache | None = None) -> None:
        super().__init__(knn)
        self._cache = cache
        self._neighbours: dict[int, Neighbours] = {}
        self.times: list[tuple[float, int, float]] = []

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Search for the root and the likeliest nodes together."""
        super().forward(states, tree, tokens)
        self._neighbours = {}
        self._search(range(ROOT, min(len(self._states) - 1, TOGETHER)))

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the log of the mixed distribution after a node."""
        if node not in self._neighbours:
            self._search([node])
        neighbours = self._neighbours[node]
        if self._cache is not None:
            self._cache.add(neighbours)
        return self._knn.logits(logits, neighbours)

    def _search(self, nodes: Sequence[int]) -> None:
        began = time.perf_counter()
        states = self._states[[node + 1 for node in nodes]]
        neighbours = self._knn.store.near.search(states, self._knn.k)
        self.times.append((began, len(nodes), 1000.0 * (time.perf_counter() - began)))
        self._neighbours.update(zip(nodes, neighbours, strict=True))


class Guessing(KnnTransform):
    """The transform that takes neighbours from a cache, and records each query."""

    def __init__(self, knn: Knn, cache: NeighbourCache) -> None:
        super().__init__(knn)
        self._cache = cache
        self.queries: list[KnnQuery] = []

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the log of the guessed distribution after a node."""
        state = self._states[node + 1]
        self.queries.append(KnnQuery(state, logits.clone(), index))
        return self._knn.logits(logits, self._cache.nearest(state, self._knn.k))
