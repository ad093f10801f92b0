"""The laws of the rows of a step, kept in step with what stands in their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.row_laws import BatchDistribution, DistributionShape
from ragspec.verification.static.layout import MOST_QUERIES

FRESH = MOST_QUERIES  # tokens that a text may gain by one step
_NOTHING = -1


class RequestDistributions:
    """Row laws, and how much of each text they know; `notify` is called before every step.

    fresh i64 [B, FRESH]: what the texts have gained, to be told by the step; elsewhere the number
    of tokens that there are, which is none of them.
    """

    def __init__(self, distributions: BatchDistribution, rows: int) -> None:
        self.distributions = distributions
        self.fresh: NDArray[np.int64] = np.full((rows, FRESH), distributions.size)
        self._held: list[TokenDistribution | None] = [None] * rows
        self._known = [0] * rows  # tokens of each text

    def notify(
        self, rows: Mapping[int, tuple[TokenDistribution, Sequence[int]]]
    ) -> DistributionShape:
        """Let the next step go by these laws and texts, and all other rows be padding.

        Rows keep what they know: of a text that goes on its new tokens alone are told.
        """
        self.fresh[:] = self.distributions.size
        late: dict[int, Sequence[int]] = {}
        for row, (held, known) in enumerate(zip(self._held, self._known, strict=True)):
            distribution, text = rows.get(row, (None, ()))
            if distribution is not held or known == _NOTHING:
                self.distributions.set(row, distribution, text)
                self._held[row], self._known[row] = distribution, len(text)
            elif len(text) > known:
                new = text[known:]
                if len(new) > FRESH:
                    late[row] = new
                else:
                    self.fresh[row, : len(new)] = new
                self._known[row] = len(text)
        if late and self.distributions.shape.penalties.texts:
            self._grow(late)
        return self.distributions.shape

    def forget(self) -> None:
        """Tell all anew before the next step, as the last one may not have been taken."""
        self._known = [_NOTHING] * len(self._known)

    def _grow(self, late: Mapping[int, Sequence[int]]) -> None:
        """Tell of texts that went on elsewhere for a while, at once."""
        tokens = np.full((len(self._held), max(map(len, late.values()))), self.distributions.size)
        for row, new in late.items():
            tokens[row, : len(new)] = new
        self.distributions.grow(torch.from_numpy(tokens).to(self.distributions.device))
