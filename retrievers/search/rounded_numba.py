"""Products of one query with vectors rounded to bytes, as compiled code (numba, the `fast` extra).

A lone query over many vectors takes as long as they take to be read, and bytes are a quarter of
float32. Sums of whole numbers are exact, so what a product is off by follows from what was rounded
off the vector and off the query alone (Cauchy-Schwarz). Without numba the module is plain Python.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.retrievers.indexes.node_heap_numba import compiled

Floats = NDArray[np.float32]

TOGETHER = 4  # vectors whose sums are made side by side: the query is read once for them
BYTE, SHORT, WORD = 127, (1 << 15) - 1, (1 << 31) - 1  # the largest numbers of 8, 16 and 32 bits
SMALLEST = 2.0**-100  # factor of whole numbers


class Rounded:
    """Vectors as whole numbers i8 [P, dimensions], a factor for each.

    blocks: the vectors f32 [n, dimensions], in order. count: how many there are.
    """

    def __init__(self, blocks: Iterable[torch.Tensor], count: int, width: int) -> None:
        self._whole = np.zeros((-(-count // TOGETHER) * TOGETHER, width), np.int8)
        self._factors = np.zeros(len(self._whole), np.float32)
        self._count = count
        self._lost = 0.0  # what was rounded off a vector, at most
        self._longest = 0.0  # of the rounded vectors
        self._most = min(SHORT, WORD // (BYTE * max(1, width)))  # so that no sum overflows
        start = 0
        for block in blocks:
            whole, factors = _rounded(block, BYTE)
            near = whole * factors
            self._lost = max(self._lost, float((block - near).norm(dim=1).max()))
            self._longest = max(self._longest, float(near.norm(dim=1).max()))
            self._whole[start : start + len(block)] = whole.to(torch.int8).numpy()
            self._factors[start : start + len(block)] = factors[:, 0].numpy()
            start += len(block)

    def products(self, query: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Return products f32 [P] with a query f32 [dimensions], and by how much they are off."""
        whole, factors = _rounded(query[None], self._most)
        out = np.empty(len(self._whole), np.float32)
        scan(self._whole, self._factors, whole[0].to(torch.int16).numpy(), float(factors), out)
        length, left = float(query.norm()), float((query - whole[0] * factors[0]).norm())
        # The last is of factors, and of what the bound is made of, in float32.
        rounding = (len(query) + 2) * 2.0**-22 * length * (self._longest + self._lost)
        error = self._lost * length + self._longest * left + rounding
        return torch.from_numpy(out[: self._count]), error


def _rounded(rows: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows f32 [R, W] as whole numbers of at most that size, and their factors [R, 1]."""
    factors = (rows.abs().amax(1, keepdim=True) / most).clamp_min(SMALLEST)
    return (rows / factors).round_().clamp_(-most, most), factors


@compiled
def scan(
    whole: NDArray[np.int8],
    factors: Floats,
    query: NDArray[np.int16],
    factor: float,
    out: Floats,
) -> None:
    """Write the products of vectors i8 [P, W], P a multiple of TOGETHER, with a query i16 [W]."""
    for row in range(0, whole.shape[0], TOGETHER):
        first, second, third, fourth = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
        for column in range(whole.shape[1]):
            value = np.int32(query[column])
            first += np.int32(whole[row, column]) * value
            second += np.int32(whole[row + 1, column]) * value
            third += np.int32(whole[row + 2, column]) * value
            fourth += np.int32(whole[row + 3, column]) * value
        out[row] = first * factors[row] * factor
        out[row + 1] = second * factors[row + 1] * factor
        out[row + 2] = third * factors[row + 2] * factor
        out[row + 3] = fourth * factors[row + 3] * factor
