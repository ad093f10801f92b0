"""The keys nearest to a state, by squared distance: exact, and the same in any company.

The distance of x and q is |q|^2 less twice x.q - |x|^2 / 2, an inner product of vectors with one
more number. Keys are centred first: distances stay, and error bounds, which go by lengths, become
smaller. Candidates are measured again in float64.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.models.packed import MOST_SHARE, free_memory
from ragspec.retrievers.search.nearest import Approximate, Exact, Floats, Numbers, Vectors, blocks

CENTRED_BY = 1 << 14  # keys whose mean is taken off


class Neighbours(NamedTuple):
    """The keys nearest to a state, nearest first: numbers i64 [k], squared distances f64 [k]."""

    numbers: Numbers
    distances: NDArray[np.float64]


class CentredKeys:
    """Keys f16 [N, H] as vectors f32 [N, H + 1]: centred, with -|x|^2 / 2 in units of `scale`."""

    def __init__(self, keys: NDArray[np.float16]) -> None:
        some = np.asarray(keys[:: max(1, len(keys) // CENTRED_BY)], np.float32)
        self._keys = keys
        self.mean = some.mean(axis=0) if len(some) else np.zeros(keys.shape[1], np.float32)
        self.scale = 1.0
        norms = [float(np.linalg.norm(block[:, :-1], axis=1).max()) for block in blocks(self)]
        self.scale = max(norms, default=0.0) or 1.0  # both parts of a product weigh alike

    @property
    def shape(self) -> tuple[int, int]:
        """Number and dimensions."""
        return len(self._keys), self._keys.shape[1] + 1

    def __getitem__(self, part: slice) -> Floats:
        """Return consecutive vectors."""
        centred = np.asarray(self._keys[part], np.float32) - self.mean
        halves = (-0.5 / self.scale) * np.square(centred).sum(axis=1, keepdims=True)
        return np.hstack([centred, halves.astype(np.float32)])

    def states(self, queries: Floats) -> Floats:
        """Return vectors f32 [Q, H + 1] whose inner products order the keys."""
        last = np.full((len(queries), 1), self.scale, np.float32)
        return np.hstack([np.asarray(queries, np.float32) - self.mean, last])


class NearestKeys:
    """Searches keys f16 [N, H], which may be a mapped file.

    further: what each further query of a search adds, as a share of a single one, about.
    """

    further = 0.1

    def __init__(self, keys: NDArray[np.float16]) -> None:
        self._keys = keys

    def search(self, queries: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H]; of equal ones the lower number."""
        vectors, exact = self._exact
        candidates = exact.candidates(vectors.states(queries), k)
        pairs = zip(queries, candidates, strict=True)
        return [measured(self._keys, query, numbers, k) for query, numbers in pairs]

    def open(self) -> None:
        """Prepare the search, which otherwise the first one does: seconds for a million keys."""
        _ = self._exact

    @cached_property
    def _exact(self) -> tuple[CentredKeys, Exact]:
        keys = CentredKeys(self._keys)
        count, width = keys.shape
        fits = 4 * count * width <= MOST_SHARE * free_memory()
        vectors: Vectors = keys[:] if fits else keys
        return keys, Exact(vectors)


class ApproximateKeys:
    """Searches keys f16 [N, H] by an index of faiss, whose candidates are measured again."""

    further = 1.0

    def __init__(self, keys: NDArray[np.float16], index: Approximate) -> None:
        self._keys = keys
        self.index = index

    def open(self) -> None:
        """Do nothing: the index is there."""

    def search(self, queries: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest of the keys that the index finds; see `NearestKeys.search`."""
        states = np.ascontiguousarray(queries, np.float32)
        candidates = self.index.candidates(states, k)
        pairs = zip(states, candidates, strict=True)
        return [measured(self._keys, query, numbers, k) for query, numbers in pairs]


def measured(keys: NDArray[np.float16], query: Floats, numbers: Numbers, k: int) -> Neighbours:
    """Return the k nearest of some keys, measured in float64."""
    rows = keys[numbers].astype(np.float64) - query.astype(np.float64)
    distances: NDArray[np.float64] = np.square(rows).sum(axis=1)
    order = np.lexsort((numbers, distances))[:k]
    return Neighbours(numbers[order], distances[order])
