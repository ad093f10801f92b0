"""The law of a kNN language model: what the target says, and what followed similar contexts.

p = (1 - weight) p_target + weight p_near, where p_near gives each neighbour's token its share of
softmax(-distance / temperature) (Khandelwal et al. 2020, arXiv 1911.00172, section 2; there the
temperature is 1, at which the nearest neighbour often takes all).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
        """Return the logarithm of the mixed law f64 [1, V] from the target's logits [1, V].

        tokens, distances [k]: those that followed the neighbours, and how far these are; without
        any the target's law stays.
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
