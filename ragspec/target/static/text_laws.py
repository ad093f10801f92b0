"""The laws of the rows of a step, kept in step with what stands in their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.sampling.distribution import TokenLaw
from ragspec.sampling.row_laws import LawShape, RowLaws
from ragspec.target.static.layout import MOST_QUERIES

FRESH = MOST_QUERIES  # tokens that a text may gain by one step
_NOTHING = -1


class TextLaws:
    """Row laws, and how much of each text they know; `tell` is called before every step.

    fresh i64 [B, FRESH]: what the texts have gained, to be told by the step; elsewhere the number
    of tokens that there are, which is none of them.
    """

    def __init__(self, distributions: RowLaws, rows: int) -> None:
        self.laws = distributions
        self.fresh: NDArray[np.int64] = np.full((rows, FRESH), distributions.size)
        self._held: list[TokenLaw | None] = [None] * rows
        self._known = [0] * rows  # tokens of each text

    def tell(self, rows: Mapping[int, tuple[TokenLaw, Sequence[int]]]) -> LawShape:
        """Let the next step go by these laws and texts, and all other rows be padding.

        Rows keep what they know: of a text that goes on its new tokens alone are told.
        """
        self.fresh[:] = self.laws.size
        late: dict[int, Sequence[int]] = {}
        for row, (held, known) in enumerate(zip(self._held, self._known, strict=True)):
            distribution, text = rows.get(row, (None, ()))
            if distribution is not held or known == _NOTHING:
                self.laws.set(row, distribution, text)
                self._held[row], self._known[row] = distribution, len(text)
            elif len(text) > known:
                new = text[known:]
                if len(new) > FRESH:
                    late[row] = new
                else:
                    self.fresh[row, : len(new)] = new
                self._known[row] = len(text)
        if late and self.laws.shape.penalties.texts:
            self._grow(late)
        return self.laws.shape

    def forget(self) -> None:
        """Tell all anew before the next step, as the last one may not have been taken."""
        self._known = [_NOTHING] * len(self._known)

    def _grow(self, late: Mapping[int, Sequence[int]]) -> None:
        """Tell of texts that went on elsewhere for a while, at once."""
        tokens = np.full((len(self._held), max(map(len, late.values()))), self.laws.size)
        for row, new in late.items():
            tokens[row, : len(new)] = new
        self.laws.grow(torch.from_numpy(tokens).to(self.laws.device))
