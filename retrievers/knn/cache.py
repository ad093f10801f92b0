"""Keys that earlier searches were near to, and what follows them: where guesses are looked up.

What a search finds for one token, the keys behind it answer for the next ones (RaLMSpec, Zhang et
al. 2024, arXiv 2401.14021, section 3: the next n = 10 positions are cached).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.knn.datastore import Datastore
from ragspec.retrievers.knn.nearest_keys import Neighbours
from ragspec.retrievers.search.nearest import Floats, Numbers

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
        selection = self._store.following(result.numbers[:most], AHEAD)[:most]
        selection = selection[np.sort(np.unique(selection, return_index=True)[1])]
        new = selection[~self._known[selection]]
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
