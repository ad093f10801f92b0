"""The keys nearest to a state.

The neighbours of a kNN language model by squared distance (Khandelwal et al. 2020, arXiv
1911.00172, section 2).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.search.nearest import Exact, Floats, Numbers

SAMPLED = 1 << 14  # keys whose mean is subtracted


class Neighbours(NamedTuple):
    """The keys nearest to a state, nearest first: numbers i64 [k], squared distances f64 [k]."""

    numbers: Numbers
    distances: NDArray[np.float64]


class NearestKeys:
    """Searches keys f16 [N, H] exactly; a result does not depend on the other states of a search.

    The squared distance of x and q is |q|^2 less twice x.q - |x|^2 / 2, an inner product of vectors
    with one more number. Centred keys have smaller error bounds. Candidates are measured again in
    float64; of equal distances the lower number comes first.

    Attributes:
        variance: Mean squared distance of the keys from their mean.
    """

    def __init__(self, keys: NDArray[np.float16]) -> None:
        self._keys = keys
        sample = np.asarray(keys[:: max(1, len(keys) // SAMPLED)], np.float32)
        self._mean = sample.mean(axis=0) if len(sample) else np.zeros(keys.shape[1], np.float32)
        vectors = np.empty((len(keys), keys.shape[1] + 1), np.float32)
        np.subtract(keys, self._mean, out=vectors[:, :-1], dtype=np.float32)
        squares = np.einsum("ij,ij->i", vectors[:, :-1], vectors[:, :-1])
        self.variance = float(squares.mean(dtype=np.float64)) if len(keys) else 0.0
        # The scale of the last number balances both parts.
        self._scale = np.float32(max(np.sqrt(squares.max(initial=0.0)), 1e-30))
        vectors[:, -1] = squares * (-0.5 / self._scale)
        self._exact = Exact(vectors)

    def search(self, states: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H]."""
        last = np.full((len(states), 1), self._scale, np.float32)
        candidates = self._exact.candidates(np.hstack([states - self._mean, last]), k)
        pairs = zip(states, candidates, strict=True)
        return [self._measure(state, numbers, k) for state, numbers in pairs]

    def _measure(self, state: Floats, numbers: Numbers, k: int) -> Neighbours:
        rows = self._keys[numbers].astype(np.float64) - state.astype(np.float64)
        distances: NDArray[np.float64] = np.square(rows).sum(axis=1)
        order = np.lexsort((numbers, distances))[:k]
        return Neighbours(numbers[order], distances[order])
