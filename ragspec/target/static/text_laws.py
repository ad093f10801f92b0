"""The laws of the rows of a step, kept in step with what stands in their texts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ragspec.sampling.distribution import TokenLaw
from ragspec.sampling.row_laws import LawShape, RowLaws


class TextLaws:
    """Row laws, and how much of each text they know; `tell` is called before every step."""

    def __init__(self, laws: RowLaws, rows: int) -> None:
        self.laws = laws
        self._held: list[TokenLaw | None] = [None] * rows
        self._known = [0] * rows  # tokens of each text

    def tell(self, rows: Mapping[int, tuple[TokenLaw, Sequence[int]]]) -> LawShape:
        """Let the next step go by these laws and texts, and all other rows be padding.

        Rows keep what they know: of a text that goes on its new tokens alone are told.
        """
        fresh: dict[int, Sequence[int]] = {}
        for row, held in enumerate(self._held):
            law, text = rows.get(row, (None, ()))
            if law is not held:
                self.laws.set(row, law, text)
                self._held[row], self._known[row] = law, len(text)
            elif len(text) > self._known[row]:
                fresh[row] = text[self._known[row] :]
                self._known[row] = len(text)
        if fresh and self.laws.shape.penalties.texts:
            self._grow(fresh)
        return self.laws.shape

    def _grow(self, fresh: Mapping[int, Sequence[int]]) -> None:
        longest = max(map(len, fresh.values()))
        tokens = torch.zeros(2, len(self._held), longest, dtype=torch.int64)
        for row, new in fresh.items():
            tokens[0, row, : len(new)] = torch.tensor(new)
            tokens[1, row, : len(new)] = 1
        moved = tokens.to(self.laws.device, non_blocking=True)
        self.laws.grow(moved[0], moved[1].bool())
