"""The distribution of a kNN language model: the target's, mixed with that of neighbours.

p = (1 - weight) p_target + weight p_near, where p_near gives each neighbour's token its share of
softmax(-distance / temperature) (Khandelwal et al. 2020, arXiv 1911.00172, section 2; there the
temperature is 1, at which the nearest neighbour often takes all).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.retrievers.knn.nearest_keys import NearestKeys, Neighbours
from ragspec.retrievers.search.nearest import Numbers

# The neighbours never take all: where processors forbid all their tokens the target's own remain.
MOST_WEIGHT = 1.0 - 1.0 / (1 << 40)


@dataclass(frozen=True, slots=True)
class Mixture:
    """weight: of the neighbours, 0 to 1. temperature: of squared distances, above 0."""

    weight: float
    temperature: float

    def shares(self, distances: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return what each neighbour counts, nearest first: [k] -> [k], 1 in all."""
        scaled = np.exp((distances[0] - distances) / self.temperature)
        shares: NDArray[np.float64] = scaled / scaled.sum()
        return shares

    def logits(
        self, logits: torch.Tensor, tokens: Numbers, distances: NDArray[np.float64]
    ) -> torch.Tensor:
        """Return the log of the mixed distribution f64 [1, V], from the logits [1, V].

        tokens, distances [k]: those that followed the neighbours, and how far these are; without
        any the target's distribution stays.
        """
        if not len(tokens):
            return logits.double().log_softmax(-1)
        distribution, weight = logits.double().softmax(-1), min(self.weight, MOST_WEIGHT)
        distribution *= 1.0 - weight
        places = torch.from_numpy(tokens).to(distribution.device)
        added = torch.from_numpy(weight * self.shares(distances)).to(distribution.device)
        # One after the other on every device, as float64 sums of few numbers do not depend on it.
        distribution[0].index_add_(0, places, added)
        return distribution.log()


PLACES = 384  # of the datastore that are asked for their own next token
FITTED = (1, 8, 32, 128, 1024)  # neighbours
WEIGHT = 0.25  # of the neighbours while it is fitted
OF_MODEL = 512  # keys before and behind a place in its own text that it may not be answered by
AT_ONCE = 16
GRID = np.geomspace(0.01, 100.0, 81)  # times the mean distance of the last neighbour


@dataclass(frozen=True, slots=True)
class Fit:
    """k: neighbours. temperature: the best one. alone, mixed: bits a token, without and with."""

    k: int
    temperature: float
    alone: float
    mixed: float


def fit(keys: NDArray[np.float16], values: Numbers, near: NearestKeys, head: Any) -> list[Fit]:
    """Return the best temperature for some numbers of neighbours, by likelihood of next tokens.

    head: makes logits [n, V] of states [n, H]. Each place is answered by keys from elsewhere: a
    text that is asked for is not in the datastore.
    """
    request = np.unique(np.linspace(0, len(keys) - 1, min(PLACES, len(keys))).astype(np.int64))
    sizes = [k for k in FITTED if k <= len(keys) // 4] or [1]
    if len(keys) < 4:
        return [Fit(1, 1.0, 0.0, 0.0)]
    alone, results = [], []
    for start in range(0, len(request), AT_ONCE):
        part = request[start : start + AT_ONCE]
        states = np.asarray(keys[part], np.float32)
        logits = head(torch.from_numpy(states)).double()
        current = torch.from_numpy(values[part])
        alone.append(logits.softmax(-1).gather(1, current[:, None])[:, 0].cpu().numpy())
        most = min(sizes[-1] + 2 * OF_MODEL, len(keys))
        results += [
            _elsewhere(n, place) for n, place in zip(near.search(states, most), part, strict=True)
        ]
    chances = np.concatenate(alone)
    return [_best(k, chances, results, values, values[request]) for k in sizes]


def _elsewhere(result: Neighbours, place: int) -> Neighbours:
    far = np.abs(result.numbers - place) > OF_MODEL
    far = far if far.any() else result.numbers != place
    return Neighbours(result.numbers[far], result.distances[far])


def _best(
    k: int,
    alone: NDArray[np.float64],
    result: Sequence[Neighbours],
    values: Numbers,
    truth: Numbers,
) -> Fit:
    near = [Neighbours(n.numbers[:k], n.distances[:k]) for n in result]
    unit = float(np.mean([n.distances[-1] for n in near])) or 1.0
    right = [values[n.numbers] == token for n, token in zip(near, truth, strict=True)]

    def bits(temperature: float) -> float:
        mixture = Mixture(WEIGHT, temperature)
        said = [
            float(mixture.shares(n.distances)[hit].sum())
            for n, hit in zip(near, right, strict=True)
        ]
        mixed = (1.0 - WEIGHT) * alone + WEIGHT * np.asarray(said)
        return float(-np.log2(np.maximum(mixed, 1e-12)).mean())

    best = min((bits(unit * scale), unit * scale) for scale in GRID)
    return Fit(k, float(best[1]), float(-np.log2(np.maximum(alone, 1e-12)).mean()), best[0])
