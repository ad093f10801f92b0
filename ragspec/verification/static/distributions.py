"""The distributions of a batch, kept on the device from step to step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ragspec.sampling.batch_distribution import BatchDistribution, DistributionShape
from ragspec.sampling.distribution import TokenDistribution
from ragspec.verification.static.layout import MOST_QUERIES

FRESH = MOST_QUERIES  # new tokens that a step can pass to the distributions of a row


class RequestDistributions:
    """The distributions of a batch, updated with new tokens; call `notify` before every step.

    Attributes:
        fresh: New tokens of each text, an input of the step, i64 [B, FRESH]. The vocabulary size,
            which is no token, pads the rows.
    """

    def __init__(self, distributions: BatchDistribution, rows: int) -> None:
        self.distributions = distributions
        self.fresh: NDArray[np.int64] = np.full((rows, FRESH), distributions.size)
        self._held: list[object] = [None] * rows
        self._known = [0] * rows  # tokens of each text that its distribution has

    def notify(
        self, rows: Mapping[int, tuple[TokenDistribution, Sequence[int]]]
    ) -> DistributionShape:
        """Set the distributions and texts of the next step. All other rows are padding.

        If a row keeps its distribution, only the new tokens of its text are passed on.
        """
        self.fresh[:] = self.distributions.size
        for row, (held, known) in enumerate(zip(self._held, self._known, strict=True)):
            distribution, text = rows.get(row, (None, ()))
            new = text[known:]
            if distribution is not held or len(new) > FRESH:
                self.distributions.set(row, distribution, text)
                self._held[row] = distribution
            else:
                self.fresh[row, : len(new)] = new
            self._known[row] = len(text)
        return self.distributions.shape

    def forget(self) -> None:
        """Pass all tokens again before the next step, because the last one may not have run."""
        self._held = [self] * len(self._held)  # which is no distribution
