"""Similar codes of a code-book: nearest neighbours, and a fixed partition into clusters.

Codes are compared as tokenizers look them up, L2-normalised for LlamaGen (arXiv 2406.06525); raw
rows have other neighbours. Distances are computed once, in blocks, in float64; a rule only reads
int32 rows. On normalised rows the order by L2 distance is the order by cosine.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.errors import InputError
from ragspec.visual.checks import checked_whole

_BLOCK = 512  # maximum codes that are compared with all others at once
_BLOCK_BYTES = 1 << 24  # maximum bytes of the distances of such a block
_ROUNDS = 25  # of k-means

Codes = NDArray[np.int32]
Distribution = NDArray[np.float64]
Book = Tensor | NDArray[np.float32] | NDArray[np.float64]


class CodeNeighbours:
    """The k nearest codes of every code, nearest first, itself excluded: int32 [V, k].

    Attributes:
        k: The number of neighbours of a code.

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
        self.k = rows.shape[1]

    @classmethod
    def build(cls, codebook: Book, k: int, normalised: bool = True, marks: int = 0) -> Self:
        """Return the k nearest codes of each row of a code-book [V, d] (tensor or array).

        Of codes at the same distance the lower id comes first.

        Args:
            normalised: Whether the tokenizer looks codes up by direction alone; False compares them
                by plain distance.
            marks: How many ids behind those of the codes are no codes; each is near itself alone.

        Raises:
            InputError: k is outside 1 .. V - 1, or a row cannot be normalised.
        """
        codes = compared_rows(codebook, normalised)
        k = checked_whole(k, "neighbours", 1, len(codes) - 1)
        rows = np.arange(len(codes) + marks, dtype=np.int32)[:, None].repeat(k, 1)
        for ids, near in _nearness(codes, codes, normalised):
            near[np.arange(len(near)), ids] = -np.inf  # by id: keep equal codes
            rows[ids] = _largest(near, k)
        return cls(rows)

    def nearest(self, k: int | None) -> Codes:
        """Return the k nearest codes of every code; all if k is None."""
        return self.rows if k is None else self.rows[:, : checked_whole(k, "k", 0, self.k)]


class CodePartition:
    """A partition of the codes into clusters.

    Args:
        clusters: Number of each code's cluster, int32 [V].
        codebook: The code-book [V, d], to order `mates` by; None leaves them in order of id.
        normalised: See `CodeNeighbours.build`.
        marks: How many ids behind those of the codes are no codes, each its own cluster.

    Raises:
        InputError: The clusters have another type or shape, or `codebook` another length.
    """

    def __init__(
        self, clusters: Codes, codebook: Book | None = None, normalised: bool = True, marks: int = 0
    ) -> None:
        if clusters.ndim != 1 or not len(clusters) or clusters.dtype != np.int32:
            raise InputError(
                f"got clusters of type {clusters.dtype} and shape {clusters.shape}; expected int32 "
                "[V], one number for each code."
            )
        ends = clusters.max() + 1 + np.arange(marks, dtype=np.int32)
        self.clusters = np.concatenate([clusters, ends])
        self._rows = None if codebook is None else compared_rows(codebook, normalised)
        if self._rows is not None and len(self._rows) != len(clusters):
            raise InputError(
                f"got clusters of {len(clusters)} codes and a code-book of {len(self._rows)}; "
                "expected the code-book that was partitioned."
            )

    @classmethod
    def build(
        cls, codebook: Book, clusters: int, seed: int = 0, normalised: bool = True, marks: int = 0
    ) -> "CodePartition":
        """Return the partition of a code-book [V, d] by k-means on its rows.

        Args:
            seed: Determines the codes that the centres start from.
            normalised, marks: See `CodeNeighbours.build`.

        Raises:
            InputError: `clusters` is outside 1 .. V, or a row cannot be normalised.
        """
        codes = compared_rows(codebook, normalised)
        clusters = checked_whole(clusters, "partition", 1, len(codes))
        start = np.random.default_rng(seed).choice(len(codes), clusters, replace=False)
        centres, belongs = codes[start], np.full(len(codes), -1)
        for _ in range(_ROUNDS):
            near = _nearness(codes, centres, normalised)
            before, belongs = belongs, np.concatenate([each.argmax(1) for _, each in near])
            if np.array_equal(before, belongs):
                break
            sums = np.zeros_like(centres)
            np.add.at(sums, belongs, codes)
            sizes = np.bincount(belongs, minlength=clusters)[:, None].astype(np.float64)
            lengths = np.linalg.norm(sums, axis=1, keepdims=True) if normalised else sizes
            centres = np.where(lengths > 0.0, sums / np.maximum(lengths, 1e-12), centres)
        return cls(belongs.astype(np.int32), codebook, normalised, marks)

    @cached_property
    def mates(self) -> list[Codes]:
        """The other codes of each code's cluster, nearest first if the code-book is known."""
        mates: list[Codes] = []
        for code, cluster in enumerate(self.clusters):
            others = np.flatnonzero(self.clusters == cluster).astype(np.int32)
            others = others[others != code]
            if self._rows is not None and len(others):
                distances = np.linalg.norm(self._rows[others] - self._rows[code], axis=1)
                others = others[np.argsort(distances, kind="stable")]
            mates.append(others)
        return mates


def compared_rows(codebook: Book, normalised: bool = True) -> NDArray[np.float64]:
    """Return the rows of a code-book [V, d] as they are compared, f64: at unit length or as is.

    Raises:
        InputError: The code-book has another shape, or a row is not finite or cannot be normalised.
    """
    rows = torch.as_tensor(codebook).detach().double().cpu().numpy()
    if rows.ndim != 2 or len(rows) < 2:
        raise InputError(f"got a code-book of shape {rows.shape}; expected [V, d] with V > 1.")
    lengths = np.linalg.norm(rows, axis=1, keepdims=True)
    bad = np.flatnonzero(~np.isfinite(lengths) | (normalised & (lengths == 0.0)))
    if len(bad):
        raise InputError(
            f"{len(bad)} rows of the code-book cannot be compared, row {int(bad[0])} the first; "
            "expected finite rows that are not zero."
        )
    return np.asarray(rows / lengths if normalised else rows)


def _nearness(
    codes: Distribution, others: Distribution, normalised: bool
) -> Iterator[tuple[NDArray[np.int64], Distribution]]:
    """Yield the numbers of some codes, and how near they are to others [C, d]: f64 [n, C]."""
    # Half of each row's square, less which products of rows order by distance.
    halves = np.zeros(len(others)) if normalised else np.square(others).sum(1) / 2
    block = max(1, min(_BLOCK, _BLOCK_BYTES // (8 * len(others))))
    for start in range(0, len(codes), block):
        near = codes[start : start + block] @ others.T
        near -= halves
        yield np.arange(start, start + len(near)), near


def _largest(near: NDArray[np.float64], k: int) -> Codes:
    """Return the column indices of each row's k largest, largest first, ties by index."""
    least = np.partition(near, near.shape[1] - k, axis=1)[:, -k]
    rows = np.empty((len(near), k), dtype=np.int32)
    for i, (row, bar) in enumerate(zip(near, least, strict=True)):
        places = np.flatnonzero(row >= bar)  # in order of id, with all ties of the last
        rows[i] = places[np.argsort(-row[places], kind="stable")][:k]
    return rows
