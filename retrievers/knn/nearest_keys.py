"""The keys nearest to a state, by squared distance: exact, and the same in any company.

The distance of x and q is |q|^2 less twice x.q - |x|^2 / 2, so one product with all keys orders
them, with -|x|^2 / 2 as one more number of each. It is made in bfloat16 over a packed copy where
the CPU has fast kernels for it, and in float32 elsewhere; an error bound says which keys may be
among the k nearest, and these are measured again, at last in float64. Keys are centred first:
distances stay, and the bound, which goes by lengths, becomes smaller.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.models.packed import MOST_SHARE, available, free_memory, halves, packed, product
from ragspec.retrievers.search.nearest import (
    BLOCK,
    LEAST_HALVES,
    PACKED_FOR,
    Approximate,
    Floats,
    Numbers,
    above,
)

CENTRED_BY = 1 << 14  # keys whose mean is taken off
PARTS = 3  # numbers in bfloat16 that stand for one in float32
ALIGNED = 32  # numbers of a row, for the kernels
MEASURED = 1 << 14  # keys that are measured at once
# What one rounding is off by at most, relative: to 24 bits, and to the 8 of bfloat16.
ROUND, ROUND_HALF = 2.0 / (1 << 25), 1.0 / (1 << 9)


class Neighbours(NamedTuple):
    """The keys nearest to a state, nearest first: numbers i64 [k], squared distances f64 [k]."""

    numbers: Numbers
    distances: NDArray[np.float64]


class NearestKeys:
    """Searches keys f16 [N, H], which may be a mapped file.

    further: what each further query of a search adds, as a share of a single one, about.
    """

    further = 0.1

    def __init__(self, keys: NDArray[np.float16]) -> None:
        self._keys = keys
        self._mean = torch.zeros(keys.shape[1])
        if len(keys):
            some = np.asarray(keys[:: max(1, len(keys) // CENTRED_BY)], np.float32)
            self._mean = torch.from_numpy(some.mean(axis=0))
        self._blocks: list[torch.Tensor] = []
        self._halved = False
        self._longest = 0.0
        self._opened = False

    def search(self, queries: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest keys of each state f32 [Q, H]; of equal ones the lower number."""
        self.open()
        centred = torch.from_numpy(np.ascontiguousarray(queries, np.float32)) - self._mean
        scores = self._scores(centred)
        slack = 2.0 * self._error(centred.norm(dim=1))
        return [
            measured(self._keys, query, above(own, k, float(most)), k)
            for own, query, most in zip(scores, queries, slack, strict=True)
        ]

    def open(self) -> None:
        """Make the copy that is searched, in bfloat16, or in float32 if there is room for it.

        The first search does it, where it was not done before: seconds for a million keys.
        """
        if self._opened:
            return
        numbers = self._keys.shape[0] * (self._keys.shape[1] + ALIGNED)
        room = MOST_SHARE * free_memory()
        self._halved = (
            len(self._keys) >= LEAST_HALVES
            and available()
            and halves()
            and 2 * numbers <= 2 * room  # the keys themselves are mapped and need not stay
        )
        keeps = self._halved or 4 * numbers <= room
        for block in self._read():
            self._longest = max(self._longest, float(block[:, :-1].norm(dim=1).max()))
            if self._halved:
                self._blocks.append(packed(_in_parts(block), PACKED_FOR))
            elif keeps:
                self._blocks.append(block)
        self._opened = True

    def _read(self) -> Iterator[torch.Tensor]:
        """Yield blocks of centred keys f32 [n, H + 1], with -|x|^2 / 2 at the end."""
        for start in range(0, len(self._keys), BLOCK):
            part = torch.from_numpy(np.asarray(self._keys[start : start + BLOCK], np.float32))
            centred = part - self._mean
            yield torch.cat([centred, -0.5 * centred.square().sum(1, keepdim=True)], dim=1)

    def _scores(self, centred: torch.Tensor) -> torch.Tensor:
        """Return x.q - |x|^2 / 2 of all keys, about: [Q, N]."""
        count, width = centred.shape
        if self._halved:
            rows = torch.zeros(count, _padded(width + PARTS), dtype=torch.bfloat16)
            rows[:, :width] = centred
            rows[:, width : width + PARTS] = 1.0
            halved: torch.Tensor = torch.cat([product(rows, b) for b in self._blocks], dim=1)
            return halved
        rows = torch.cat([centred, torch.ones(count, 1)], dim=1)
        wanted = rows if count > 1 else rows.repeat(2, 1)  # a product with a vector is slower
        blocks = self._blocks or self._read()
        found: torch.Tensor = torch.cat([block @ wanted.T for block in blocks]).T[:count]
        return found

    def _error(self, lengths: torch.Tensor) -> torch.Tensor:
        """Return by how much a score may be off, for states of these lengths f32 [Q]."""
        most, width = self._longest, self._keys.shape[1]
        sizes = lengths * most + 0.5 * most * most  # of a product and the number beside it
        error: torch.Tensor = sizes * ((width + PARTS + 2) * ROUND)
        if self._halved:
            # Both factors are rounded to 8 bits, the number beside to 24, and what comes out to 8.
            factors = lengths * most * (2.0 * ROUND_HALF + ROUND_HALF * ROUND_HALF)
            error = error + factors + sizes * (ROUND_HALF + ROUND)
        return error


class ApproximateKeys:
    """Searches keys f16 [N, H] by an index of faiss, whose candidates are measured again."""

    further = 1.0

    def __init__(self, keys: NDArray[np.float16], index: Approximate) -> None:
        self._keys = keys
        self.index = index

    def open(self) -> None:
        """Do nothing: the index is there."""

    def search(self, queries: Floats, k: int) -> list[Neighbours]:
        """Return the k nearest of the keys that the index finds; see `NearestKeys.search`."""
        states = np.ascontiguousarray(queries, np.float32)
        named = self.index.candidates(states, k)
        pairs = zip(named, states, strict=True)
        return [measured(self._keys, query, torch.from_numpy(found), k) for found, query in pairs]


def measured(keys: NDArray[np.float16], query: Floats, numbers: torch.Tensor, k: int) -> Neighbours:
    """Return the k nearest of some keys, measured in float32 and what is left in float64."""
    state = torch.from_numpy(np.ascontiguousarray(query, np.float32))
    parts = [
        (torch.from_numpy(keys[part.numpy()]).float() - state).square().sum(1)
        for part in torch.split(numbers, MEASURED)
    ]
    rough = torch.cat(parts)
    if len(rough) > k:
        bound = float(rough.kthvalue(k).values)
        # Of the distance each difference, square and sum is off by its last bit.
        slack = 4.0 * (keys.shape[1] + 4) * ROUND
        numbers = numbers[rough <= bound * (1.0 + slack) + 1e-30]
    found: Numbers = np.asarray(numbers.numpy(), np.int64)
    rows = keys[found].astype(np.float64) - query.astype(np.float64)
    distances: NDArray[np.float64] = (rows * rows).sum(axis=1)
    order = np.lexsort((found, distances))[:k]
    return Neighbours(found[order], distances[order])


def _in_parts(block: torch.Tensor) -> torch.Tensor:
    """Return keys in bfloat16 [n, H + 3 and zeros], the last number of each in three parts."""
    count, width = block.shape[0], block.shape[1] - 1
    rows = torch.zeros(count, _padded(width + PARTS), dtype=torch.bfloat16)
    rows[:, :width] = block[:, :width]
    left = block[:, width]
    for part in range(PARTS):
        rows[:, width + part] = left
        left = left - rows[:, width + part].float()
    return rows


def _padded(width: int) -> int:
    return -(-width // ALIGNED) * ALIGNED
