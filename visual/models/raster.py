"""The grid of an image's codes, and its layout in the tokens that a model generates."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from ragspec.sampling.settings import checked_count
from ragspec.visual.checks import side_of

Number = TypeVar("Number", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Raster:
    """A grid of `height` rows of `width` codes; `ends` tokens that are no codes follow each row."""

    height: int
    width: int
    ends: int = 0

    def __post_init__(self) -> None:
        checked_count(self.height, "height")
        checked_count(self.width, "width")

    @property
    def line(self) -> int:
        """Tokens per row."""
        return self.width + self.ends

    @property
    def tokens(self) -> int:
        """Tokens per image."""
        return self.height * self.line

    @property
    def codes(self) -> int:
        """Codes per image."""
        return self.height * self.width

    @property
    def shape(self) -> tuple[int, int]:
        """(height, width)."""
        return self.height, self.width

    @property
    def places(self) -> NDArray[np.int64]:
        """The indices of the tokens that are codes, i64 [codes]."""
        return self.grid(np.arange(self.tokens)).reshape(-1)

    def grid(self, values: NDArray[Number]) -> NDArray[Number]:
        """Return the entries of values [tokens] that belong to codes, as [h, w]."""
        return values.reshape(self.height, self.line)[:, : self.width]

    def known(self, tokens: Sequence[int]) -> list[int]:
        """Return the codes among the first tokens of an image."""
        return [token for at, token in enumerate(tokens) if at % self.line < self.width]

    def laid(self, codes: Sequence[int]) -> list[int]:
        """Lay out an image's first codes as tokens, with -1 for the ends of full rows."""
        rows = [list(codes[at : at + self.width]) for at in range(0, len(codes), self.width)]
        filled = [[*row, *[-1] * self.ends] if len(row) == self.width else row for row in rows]
        return [code for row in filled for code in row]


def square(count: int) -> Raster:
    """Return a square of `count` codes, or one row if that is no square number."""
    side = side_of(count)
    return Raster(1, count) if side is None else Raster(side, side)
