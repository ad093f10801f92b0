"""The keys nearest to a state, and the distribution of the tokens that followed them (kNN-LM).

p = (1 - weight) p_target + weight p_near. p_near gives the token of each neighbour its share of
softmax(-distance / temperature), with squared distances (Khandelwal et al. 2020, arXiv 1911.00172,
section 2). At the paper's temperature of 1 the nearest neighbour often gets all of p_near.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.retrievers.search.nearest import Exact, Floats, Numbers

SAMPLED = 1 << 14  # keys whose mean is subtracted
# Below 1: if processors forbid all tokens of the neighbours, those of the target remain.
MOST_WEIGHT = 1.0 - 1.0 / (1 << 40)
FIT_PLACES = 384  # keys of the datastore that serve as queries of the fit
FIT_K, FIT_WEIGHT = 32, 0.25
SAME_TEXT = 512  # keys before and behind a query that are left out of its neighbours
GRID = np.geomspace(0.01, 100.0, 81)  # temperatures, times the mean distance of the last neighbour


class Neighbours(NamedTuple):
    """The keys nearest to a state, nearest first: numbers i64 [k], squared distances f64 [k]."""

    numbers: Numbers
    distances: NDArray[np.float64]


class NearestKeys:
    """Searches keys f16 [N, H] exactly; a result does not depend on the other states of a search.

    The squared distance of x and q is |q|^2 less twice x.q - |x|^2 / 2, an inner product of vectors
    with one more number. Centred keys have smaller error bounds. Candidates are measured again in
    float64; of equal distances the lower number comes first.
    """

    def __init__(self, keys: NDArray[np.float16]) -> None:
        self._keys = keys

    @cached_property
    def _exact(self) -> tuple[Floats, np.float32, Exact]:
        """The mean, the scale of the last number, and the search; seconds for a million keys."""
        sample = np.asarray(self._keys[:: max(1, len(self._keys) // SAMPLED)], np.float32)
        mean = sample.mean(axis=0) if len(sample) else np.zeros(self._keys.shape[1], np.float32)
        vectors = np.empty((len(self._keys), self._keys.shape[1] + 1), np.float32)
        np.subtract(self._keys, mean, out=vectors[:, :-1], dtype=np.float32)
        squares = np.einsum("ij,ij->i", vectors[:, :-1], vectors[:, :-1])
        scale = np.float32(max(np.sqrt(squares.max(initial=0.0)), 1e-30))  # balances both parts
        vectors[:, -1] = squares * (-0.5 / scale)
        return mean, scale, Exact(vectors)

    def open(self) -> None:
        """Prepare the search now instead of at the first query."""
        _ = self._exact

    def search(self, states: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H]."""
        mean, scale, exact = self._exact
        last = np.full((len(states), 1), scale, np.float32)
        candidates = exact.candidates(np.hstack([states - mean, last]), k)
        pairs = zip(states, candidates, strict=True)
        return [self._measure(state, numbers, k) for state, numbers in pairs]

    def _measure(self, state: Floats, numbers: Numbers, k: int) -> Neighbours:
        rows = self._keys[numbers].astype(np.float64) - state.astype(np.float64)
        distances: NDArray[np.float64] = np.square(rows).sum(axis=1)
        order = np.lexsort((numbers, distances))[:k]
        return Neighbours(numbers[order], distances[order])


@dataclass(frozen=True, slots=True)
class Mixture:
    """The mixture of the target's distribution and that of the neighbours.

    Attributes:
        weight: Weight of the neighbours, 0 to 1.
        temperature: Temperature of squared distances, above 0.
    """

    weight: float
    temperature: float

    def shares(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the share of each neighbour, nearest first: [k] -> [k], with a sum of 1."""
        scaled = np.exp((distances[0] - distances) / self.temperature)
        shares: NDArray[np.float64] = scaled / scaled.sum()
        return shares

    def logits(self, logits: Tensor, tokens: Numbers, distances: NDArray[np.float64]) -> Tensor:
        """Return the log of the mixed distribution f64 [1, V], from the target's logits [1, V].

        Args:
            tokens, distances: The token behind each neighbour, and its squared distance [k].
        """
        distribution, weight = logits.double().softmax(-1), min(self.weight, MOST_WEIGHT)
        distribution *= 1.0 - weight
        places = torch.from_numpy(tokens).to(distribution.device)
        added = torch.from_numpy(weight * self.shares(distances)).to(distribution.device)
        # In float64 the order of these few additions does not matter: all devices agree.
        distribution[0].index_add_(0, places, added)
        return distribution.log()


@dataclass(frozen=True, slots=True)
class Fit:
    """The best temperature for k neighbours, and bits per token without and with the mixture."""

    k: int
    temperature: float
    alone: float
    mixed: float


def fit_temperature(keys: NDArray[np.float16], values: Numbers, head: Any) -> Fit:
    """Return the temperature that gives the next tokens the highest likelihood.

    Neighbours near a query are left out, since a text to be continued is not in the datastore.

    Args:
        head: Returns logits [n, V] of states [n, H].
    """
    if len(keys) < 4:
        return Fit(1, 1.0, 0.0, 0.0)
    places = np.unique(np.linspace(0, len(keys) - 1, min(FIT_PLACES, len(keys))).astype(np.int64))
    states = np.asarray(keys[places], np.float32)
    chances = head(torch.from_numpy(states)).double().softmax(-1)
    alone = chances.gather(1, torch.from_numpy(values[places])[:, None])[:, 0].cpu().numpy()
    k = min(FIT_K, max(1, len(keys) // 4))
    near = []
    searched = NearestKeys(keys).search(states, k + 2 * SAME_TEXT)
    for place, (numbers, distances) in zip(places, searched, strict=True):
        far = np.abs(numbers - place) > SAME_TEXT
        far = far if far.any() else numbers != place
        near.append(Neighbours(numbers[far][:k], distances[far][:k]))
    right = [values[n.numbers] == values[place] for n, place in zip(near, places, strict=True)]

    def bits(temperature: float) -> float:
        mixture = Mixture(FIT_WEIGHT, temperature)
        pairs = zip(near, right, strict=True)
        shares = np.asarray([mixture.shares(n.distances)[hit].sum() for n, hit in pairs])
        return _bits((1.0 - FIT_WEIGHT) * alone + FIT_WEIGHT * shares)

    unit = float(np.mean([n.distances[-1] for n in near])) or 1.0
    mixed, temperature = min((bits(unit * scale), unit * scale) for scale in GRID)
    return Fit(k, float(temperature), _bits(alone), mixed)


def _bits(chances: NDArray[np.float64]) -> float:
    return float(-np.log2(np.maximum(chances, 1e-12)).mean())
