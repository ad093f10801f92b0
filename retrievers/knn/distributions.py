"""Keys that earlier searches were near to, and what follows them: where guesses are looked up.

What a search finds for one token, the keys behind it answer for the next ones (RaLMSpec, Zhang et
al. 2024, arXiv 2401.14021, section 3: the next n = 10 positions are cached).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ragspec.retrievers.knn.datastore import Datastore
from ragspec.retrievers.knn.neighbours import Mixture, Neighbours
from ragspec.retrievers.search.nearest import Floats, Numbers
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.transform import TextStart
from ragspec.trees.draft_tree import ROOT, DraftTree

AHEAD = 10  # keys behind a neighbour
CACHED = 1 << 14  # keys in all, of which the oldest leave
ADDED = 1 << 11  # keys of one search, those of its nearest ones


class NeighbourCache:
    """Some keys of a datastore, those of one text's searches; forgets the oldest."""

    def __init__(self, store: Datastore, most: int = CACHED) -> None:
        self._store = store
        most = max(1, min(most, len(store)))
        self._keys: Floats = np.zeros((most, store.width), np.float32)
        self._half: Floats = np.zeros(most, np.float32)  # |x|^2 / 2
        self._numbers: Numbers = np.full(most, -1, np.int64)
        self._known: NDArray[np.bool_] = np.zeros(len(store), np.bool_)
        self._next = 0
        self.size = 0

    def add(self, result: Neighbours) -> None:
        """Keep what a search found, and what follows it."""
        most = min(ADDED, len(self._numbers))
        following = self._store.following(result.numbers[:most], AHEAD)[:most]
        following = following[np.sort(np.unique(following, return_index=True)[1])]
        new = following[~self._known[following]]
        if not len(new):
            return
        places = (self._next + np.arange(len(new))) % len(self._numbers)
        gone = self._numbers[places]
        self._known[gone[gone >= 0]] = False
        self._known[new] = True
        rows = np.asarray(self._store.keys[new], np.float32)
        self._keys[places], self._numbers[places] = rows, new
        self._half[places] = 0.5 * np.einsum("ij,ij->i", rows, rows)
        self._next = int(places[-1] + 1) % len(self._numbers)
        self.size = min(self.size + len(new), len(self._numbers))

    def nearest(self, state: Floats, k: int) -> Neighbours:
        """Return the k nearest of the keys that are here, in float32: good enough for a guess."""
        scores = self._keys[: self.size] @ state - self._half[: self.size]
        if k < self.size:
            best = np.argpartition(-scores, k - 1)[:k]
            best = best[np.argsort(-scores[best])]
        else:
            best = np.argsort(-scores)
        distances = np.maximum(float(state @ state) - 2.0 * scores[best].astype(np.float64), 0.0)
        return Neighbours(self._numbers[best], distances)


NAME = "knn"
TOGETHER = 16  # of a draft's nodes that are searched with the root, in one pass over the keys


@dataclass(frozen=True, slots=True)
class Knn:
    """A datastore and how it counts: k neighbours, in a mixture."""

    store: Datastore
    k: int
    mixture: Mixture

    def search(self, states: Floats) -> list[Neighbours]:
        """Return the neighbours of states f32 [Q, H]."""
        return self.store.search(states, self.k)

    def logits(self, logits: Tensor, result: Neighbours) -> Tensor:
        """Return the mixed distribution f64 [1, V] from the target's logits [1, V]."""
        return self.mixture.logits(logits, self.store.values[result.numbers], result.distances)


@dataclass(frozen=True, slots=True, eq=False)
class KnnQuery:
    """A place of the text that was guessed: the state f32 [H], the target's logits [1, V].

    index: the generated index of the token that follows.
    """

    state: Floats
    logits: Tensor
    index: int


class Searching:
    """Makes the distribution of a text by searching for every token: what the text is defined by.

    cache: takes what is found, for guesses to come. times: of each search when it began, its
    queries and milliseconds.
    """

    name = NAME
    reads_hidden = True

    def __init__(self, knn: Knn, cache: NeighbourCache | None = None) -> None:
        self._knn = knn
        self._cache = cache
        self._states: Floats = np.zeros((0, knn.store.width), np.float32)
        self._matches: dict[int, Neighbours] = {}
        self.distribution: TokenDistribution | None = None
        self.times: list[tuple[float, int, float]] = []

    def open(self, start: TextStart) -> Searching:
        """Serve one text."""
        self.distribution = start.distribution
        return self

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Search for the root and the likeliest nodes together."""
        assert states is not None
        self._states = on_host(states)
        self._matches = {}
        self._search(range(ROOT, min(len(self._states) - 1, TOGETHER)))

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the mixed distribution after a node."""
        if node not in self._matches:
            self._search([node])
        result = self._matches[node]
        if self._cache is not None:
            self._cache.add(result)
        return self._knn.logits(logits, result)

    def _search(self, nodes: Sequence[int]) -> None:
        began = time.perf_counter()
        result = self._knn.search(self._states[[node + 1 for node in nodes]])
        self.times.append((began, len(nodes), 1000.0 * (time.perf_counter() - began)))
        self._matches.update(zip(nodes, result, strict=True))


@dataclass(slots=True)
class Guessing:
    """Makes the distribution from a cache, and notes each place."""

    knn: Knn
    cache: NeighbourCache
    name: str = NAME
    reads_hidden: bool = True
    queries: list[KnnQuery] = field(default_factory=list)
    distribution: TokenDistribution | None = None
    _states: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def open(self, start: TextStart) -> Guessing:
        """Serve one text."""
        self.distribution = start.distribution
        return self

    def forward(self, states: Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Take the states."""
        assert states is not None
        self._states = on_host(states)

    def logits(self, node: int, logits: Tensor, index: int) -> Tensor:
        """Return the guessed distribution after a node."""
        state = self._states[node + 1]
        self.queries.append(KnnQuery(state, logits.clone(), index))
        return self.knn.logits(logits, self.cache.nearest(state, self.knn.k))


def on_host(states: Tensor) -> Floats:
    """Return states as a float32 array of their own."""
    result: Floats = states.float().cpu().numpy()
    return result
