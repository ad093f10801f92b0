"""Similar codes of a code-book: nearest neighbours, and a fixed partition into clusters.

Codes are compared as tokenizers look them up, L2-normalised for LlamaGen (arXiv 2406.06525); raw
rows have other neighbours. Distances are computed once, in blocks, in float64; a rule only reads
int32 rows. On normalised rows the order by L2 distance is the order by cosine.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.settings import whole

_BLOCK = 512  # maximum codes that are compared with all others at once
_BLOCK_BYTES = 1 << 24  # maximum bytes of the distances of such a block
_ROUNDS = 25  # of k-means

Codes = NDArray[np.int32]
Book = Tensor | NDArray[np.float32] | NDArray[np.float64]


class CodeNeighbours:
    """The k nearest codes of every code, nearest first, itself excluded: int32 [V, k].

    Attributes:
        size, k: The number of codes V, and of neighbours per code.

    Raises:
        InputError: The table has another type or shape, or ids out of range.
    """

    def __init__(self, rows: Codes) -> None:
        if rows.ndim != 2 or rows.dtype != np.int32 or not 1 <= rows.shape[1] < len(rows):
            raise InputError(
                f"got neighbours of type {rows.dtype} and shape {rows.shape}; expected int32 "
                "[V, k] with k from 1 to V - 1. Make them with CodeNeighbours.build(codebook, k)."
            )
        if int(rows.min()) < 0 or int(rows.max()) >= len(rows):
            raise InputError(
                f"got neighbours {int(rows.min())} to {int(rows.max())} in a table of {len(rows)} "
                "codes; expected ids within it. Build the table from the code-book again."
            )
        self.rows: Codes = np.asarray(rows)  # of a memory map: a plain array
        self.size, self.k = rows.shape

    @classmethod
    def build(cls, codebook: Book, k: int, normalised: bool = True) -> CodeNeighbours:
        """Return the k nearest codes of each row of a code-book [V, d] (tensor or array).

        Of codes at the same distance the lower id comes first.

        Args:
            normalised: Whether the tokenizer looks codes up by direction alone; False compares them
                by plain distance.

        Raises:
            InputError: k is outside 1 .. V - 1, or a row cannot be normalised.
        """
        codes, k = compared_rows(codebook, normalised), whole(inputs := k) or 0
        lengths = np.zeros(len(codes)) if normalised else np.square(codes).sum(1) / 2
        if not 1 <= k < len(codes):
            raise InputError(
                f"got k={inputs!r} neighbours for {len(codes)} codes; expected 1 to "
                f"{len(codes) - 1}, a whole number."
            )
        rows = np.empty((len(codes), k), dtype=np.int32)
        block = _block(len(codes))
        for start in range(0, len(codes), block):
            near = codes[start : start + block] @ codes.T
            near -= lengths
            ids = np.arange(start, start + len(near))
            near[np.arange(len(near)), ids] = -np.inf  # by id: keep equal codes
            rows[ids] = _largest(near, k)
        return cls(rows)

    def with_marks(self, count: int) -> CodeNeighbours:
        """Return the table with `count` more ids that are no codes and have no neighbours."""
        marks = np.arange(self.size, self.size + count, dtype=np.int32)
        alone = np.repeat(marks[:, None], self.k, axis=1)  # its only neighbour is itself
        return CodeNeighbours(np.concatenate([self.rows, alone]))


class CodePartition:
    """A partition of the codes into clusters.

    Args:
        clusters: Number of each code's cluster, int32 [V].
        codebook: The code-book [V, d], to order `mates` by; None leaves them in order of id.

    Attributes:
        size: The number of codes V.

    Raises:
        InputError: The clusters have another type or shape, or `codebook` another length.
    """

    def __init__(self, clusters: Codes, codebook: Book | None = None) -> None:
        if clusters.ndim != 1 or not len(clusters) or clusters.dtype != np.int32:
            raise InputError(
                f"got clusters of type {clusters.dtype} and shape {clusters.shape}; expected int32 "
                "[V], one number for each code."
            )
        self.clusters, self.size = clusters, len(clusters)
        self._units = None if codebook is None else compared_rows(codebook)
        if self._units is not None and len(self._units) != len(clusters):
            raise InputError(
                f"got clusters of {len(clusters)} codes and a code-book of {len(self._units)}; "
                "expected the code-book that was partitioned."
            )

    @classmethod
    def build(
        cls, codebook: Book, clusters: int, seed: int = 0, normalised: bool = True
    ) -> CodePartition:
        """Return the partition of a code-book [V, d] by k-means on its rows.

        Args:
            seed: Determines the codes that the centres start from.
            normalised: See `CodeNeighbours.build`.

        Raises:
            InputError: `clusters` is outside 1 .. V, or a row cannot be normalised.
        """
        codes, clusters = compared_rows(codebook, normalised), whole(inputs := clusters) or 0
        if not 1 <= clusters <= len(codes):
            raise InputError(
                f"got {inputs!r} clusters of {len(codes)} codes; expected 1 to that, a whole "
                "number."
            )
        start = np.random.default_rng(seed).choice(len(codes), clusters, replace=False)
        centres, belongs = codes[start], np.full(len(codes), -1)
        for _ in range(_ROUNDS):
            before, belongs = belongs, _nearest(codes, centres, normalised)
            if np.array_equal(before, belongs):
                break
            sums = np.zeros_like(centres)
            np.add.at(sums, belongs, codes)
            sizes = np.bincount(belongs, minlength=clusters)[:, None].astype(np.float64)
            lengths = np.linalg.norm(sums, axis=1, keepdims=True) if normalised else sizes
            centres = np.where(lengths > 0.0, sums / np.maximum(lengths, 1e-12), centres)
        return cls(belongs.astype(np.int32), codebook)

    def with_marks(self, count: int) -> CodePartition:
        """Return the partition with `count` more ids that are no codes, each its own cluster."""
        marks = np.arange(count, dtype=np.int32) + self.clusters.max() + np.int32(1)
        partition = CodePartition(np.concatenate([self.clusters, marks]))
        partition.mates = [*self.mates, *[np.empty(0, np.int32)] * count]
        return partition

    @cached_property
    def mates(self) -> list[Codes]:
        """The other codes of each code's cluster, nearest first if the code-book is known."""
        order = np.argsort(self.clusters, kind="stable").astype(np.int32)
        edges = np.flatnonzero(np.diff(self.clusters[order])) + 1
        mates: list[Codes] = [np.empty(0, np.int32)] * self.size
        for members in np.split(order, edges):
            for code in members.tolist():
                others = members[members != code]
                if self._units is not None:
                    near = self._units[others] @ self._units[code]
                    others = others[np.argsort(-near, kind="stable")]
                mates[code] = others
        return mates


def compared_rows(codebook: Book, normalised: bool = True) -> NDArray[np.float64]:
    """Return the rows of a code-book [V, d] as they are compared, f64: at unit length or as is.

    Raises:
        InputError: The code-book has another shape, or a row is zero or not finite.
    """
    rows = torch.as_tensor(codebook).detach().double().cpu().numpy()
    if rows.ndim != 2 or len(rows) < 2:
        raise InputError(f"got a code-book of shape {rows.shape}; expected [V, d] with V > 1.")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = np.flatnonzero(~(np.isfinite(lengths) & (lengths > 0.0)))
    if len(bad):
        raise InputError(
            f"{len(bad)} rows of the code-book cannot be normalised, row {int(bad[0])} the first; "
            "expected finite rows that are not zero."
        )
    return np.asarray(rows / lengths if normalised else rows)


def _block(codes: int) -> int:
    """Return how many codes are compared with `codes` others at once."""
    return max(1, min(_BLOCK, _BLOCK_BYTES // (np.dtype(np.float64).itemsize * codes)))


def _nearest(
    codes: NDArray[np.float64], centres: NDArray[np.float64], normalised: bool
) -> NDArray[np.int64]:
    """Return the number of the centre [C, d] that is nearest to each code: i64 [V]."""
    block = _block(len(centres))
    starts = range(0, len(codes), block)
    lengths = np.zeros(len(centres)) if normalised else np.square(centres).sum(1) / 2
    return np.concatenate([(codes[i : i + block] @ centres.T - lengths).argmax(1) for i in starts])


def _largest(near: NDArray[np.float64], k: int) -> Codes:
    """Return the column indices of each row's k largest, largest first, ties by index."""
    least = np.partition(near, near.shape[1] - k, axis=1)[:, -k]
    rows = np.empty((len(near), k), dtype=np.int32)
    for i, (row, bar) in enumerate(zip(near, least, strict=True)):
        places = np.flatnonzero(row >= bar)  # in order of id, with all ties of the last
        rows[i] = places[np.argsort(-row[places], kind="stable")][:k]
    return rows
