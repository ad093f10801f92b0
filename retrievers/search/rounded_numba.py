"""Products of queries with vectors rounded to bytes, as compiled code (numba, the `fast` extra).

A search takes as long as the vectors take to be read, and bytes are a quarter of float32. Sums of
whole numbers are exact, so what a product is off by follows from what was rounded off the vector
and off the query alone (Cauchy-Schwarz).

Pairs of numbers of 16 vectors lie side by side: see `lanes_numba`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.retrievers.indexes.node_heap_numba import compiled
from ragspec.retrievers.search.lanes_numba import LANES, pair_sums

Floats = NDArray[np.float32]

MOST_KEPT = 8  # queries for whose products memory is kept: 32 bytes for each vector
TOGETHER = 4  # queries for which a vector is read once: more sums than that leave the registers
LEAST_GROUPS = 1 << 11  # read for one query, which are worth a thread
BYTE, SHORT, WORD = 127, (1 << 15) - 1, (1 << 31) - 1  # the largest numbers of 8, 16 and 32 bits
SMALLEST = 2.0**-100  # factor of whole numbers


class Rounded:
    """Vectors as whole numbers i8 [P / 16, dimensions / 2, 16, 2], a factor for each.

    blocks: the vectors f32 [n, dimensions], in order. count: how many there are.
    """

    def __init__(self, blocks: Iterable[torch.Tensor], count: int, width: int) -> None:
        self._pairs = np.zeros((-(-count // LANES), max(1, -(-width // 2)), LANES, 2), np.int8)
        self._factors = np.zeros((len(self._pairs), LANES), np.float32)
        self._count = count
        self._kept = threading.local()
        self._lost = 0.0  # what was rounded off a vector, at most
        self._longest = 0.0  # of the rounded vectors
        self._most = min(SHORT, WORD // (BYTE * max(1, width)))  # so that no sum overflows
        start = 0
        for block in blocks:
            whole, factors = _rounded(block, BYTE)
            near = whole * factors
            self._lost = max(self._lost, float((block - near).norm(dim=1).max()))
            self._longest = max(self._longest, float(near.norm(dim=1).max()))
            rows = np.arange(start, start + len(block))
            self._factors[rows // LANES, rows % LANES] = factors[:, 0].numpy()
            codes = whole.to(torch.int8).numpy()
            for half in range(2):
                part = codes[:, half::2]
                self._pairs[rows // LANES, : part.shape[1], rows % LANES, half] = part
            start += len(block)
        for queries in range(1, 3):  # numba compiles or loads now and not when somebody waits
            self.products(torch.zeros(queries, width))

    def products(self, queries: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """Return products f32 [Q, P] with queries f32 [Q, dimensions], and how far each is off.

        The products are lent until the thread's next call: to map fresh memory for so many numbers
        takes a third of the time.
        """
        whole, factors = _rounded(queries, self._most)
        count, width = queries.shape
        numbers = np.zeros((count, 2 * self._pairs.shape[1]), np.int16)
        numbers[:, :width] = whole.to(torch.int16).numpy()
        out = self._room(count)
        scan(self._pairs, self._factors, numbers, factors[:, 0].numpy(), out)
        lengths = queries.norm(dim=1)
        left = (queries - whole * factors).norm(dim=1)
        # The last is of factors, and of what the bound is made of, in float32.
        rounding = (width + 2) * 2.0**-22 * (self._longest + self._lost)
        errors = (self._lost + rounding) * lengths + self._longest * left
        return torch.from_numpy(out)[:, : self._count], errors.tolist()

    def _room(self, count: int) -> Floats:
        """Return memory for the products of so many queries, the thread's last if it suffices."""
        kept: Floats | None = getattr(self._kept, "room", None)
        if kept is not None and len(kept) >= count:
            return kept[:count]
        made = np.empty((count, LANES * len(self._pairs)), np.float32)
        if count <= MOST_KEPT:
            self._kept.room = made
        return made


def _rounded(rows: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows f32 [R, W] as whole numbers of at most that size, and their factors [R, 1]."""
    factors = (rows.abs().amax(1, keepdim=True) / most).clamp_min(SMALLEST)
    return (rows / factors).round_().clamp_(-most, most), factors


def scan(
    pairs: NDArray[np.int8],
    factors: Floats,
    queries: NDArray[np.int16],
    scales: Floats,
    out: Floats,
) -> None:
    """Write products [Q, P] of vectors i8 [P / 16, W / 2, 16, 2] and queries i16 [Q, W].

    factors f32 [P / 16, 16] and scales f32 [Q] are what their whole numbers are multiplied by.
    Large work is shared by as many threads as torch has.
    """
    count, width = queries.shape
    size = TOGETHER if count > 1 else 1
    padded = np.zeros((-(-count // size), size, width), np.int16)
    padded.reshape(-1, width)[:count] = queries
    # A pair of a query is one number of 32 bits, and those of a few queries stand together.
    told = np.ascontiguousarray(padded.view(np.int32).transpose(0, 2, 1))
    scan_some = _scan_fours if count > 1 else _scan_one
    groups = len(pairs)
    threads = max(1, min(torch.get_num_threads(), groups * count // LEAST_GROUPS))
    if threads == 1:
        scan_some(pairs, factors, told, scales, out, 0, groups)
        return
    ends = np.linspace(0, groups, threads + 1, dtype=np.int64)
    with ThreadPoolExecutor(threads) as pool:
        parts = pairwise(ends)
        list(pool.map(lambda part: scan_some(pairs, factors, told, scales, out, *part), parts))


_sums_of_one, _sums_of_four = pair_sums(1), pair_sums(TOGETHER)


@compiled
def _scan_one(
    pairs: NDArray[np.int8],
    factors: Floats,
    told: NDArray[np.int32],
    scales: Floats,
    out: Floats,
    first: int,
    last: int,
) -> None:
    """Write the products [1, P] of one query, told as pairs i32 [1, W / 2, 1], of some groups."""
    sums = np.empty((1, LANES), np.int32)
    for group in range(first, last):
        _sums_of_one(pairs, group, told[0], sums)
        for lane in range(LANES):
            out[0, group * LANES + lane] = sums[0, lane] * factors[group, lane] * scales[0]


@compiled
def _scan_fours(
    pairs: NDArray[np.int8],
    factors: Floats,
    told: NDArray[np.int32],
    scales: Floats,
    out: Floats,
    first: int,
    last: int,
) -> None:
    """Write the products [Q, P] of queries in fours, told as pairs i32 [F, W / 2, 4].

    A group of vectors is read from memory once for all queries.
    """
    sums = np.empty((TOGETHER, LANES), np.int32)
    for group in range(first, last):
        for four in range(len(told)):
            _sums_of_four(pairs, group, told[four], sums)
            start = four * TOGETHER
            for query in range(start, min(start + TOGETHER, len(out))):
                for lane in range(LANES):
                    product = sums[query - start, lane] * factors[group, lane] * scales[query]
                    out[query, group * LANES + lane] = product
