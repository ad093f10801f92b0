"""The nearest of many vectors: by an exact search, or by an approximate index of faiss.

Both only find candidates, which `DenseIndex` scores again in float64. So a result depends neither
on the number of queries in a call nor on threads or kernels.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import MissingExtraError, StoreError
from ragspec.registry import optional_packages

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

BLOCK = 1 << 15  # vectors of one product
LARGE = 1 << 15  # collections of at least this many vectors are scanned in 8 bits by faiss
SCANNED = 512  # fewest candidates of a scan in 8 bits; 4 for each result
FEW = 2  # for up to so many queries, scans take less time than one product
FLAT, HNSW = KINDS = ("exact", "hnsw")
SEARCHED = 128  # fewest candidates of an approximate index, for any k
HNSW_LINKS, HNSW_BUILT = 32, 200


class Exact:
    """All inner products, in float32 or, for large collections, first in 8 bits by faiss.

    Scores in lower precision are off by at most e. A vector whose score is at least the k-th
    largest less 2 e may be among the k best, so it becomes a candidate. If the scan in 8 bits may
    have missed a candidate of a query, the product in float32 is computed for that query.
    """

    kind = FLAT

    def __init__(self, vectors: Floats) -> None:
        self._vectors = vectors
        self._longest = max(float(np.linalg.norm(b, axis=1).max()) for b in blocks(vectors))

    def candidates(self, queries: Floats, k: int) -> list[Numbers]:
        """Return the positions that may be among the k best of each query f32 [Q, dimensions]."""
        count = self._vectors.shape[0]
        queries, k = np.ascontiguousarray(queries), min(k, count)
        if count < LARGE or len(queries) > FEW or self.scan is None:
            return self._products(queries, k)
        results = self.scan.candidates(queries, k)
        missed = [place for place, numbers in enumerate(results) if numbers is None]
        again = iter(self._products(queries[missed], k) if missed else ())
        return [next(again) if numbers is None else numbers for numbers in results]

    @cached_property
    def scan(self) -> "QuantizedScan | None":
        """A copy in 8 bits, made at the first search of its kind; None without faiss."""
        try:
            return QuantizedScan(self._vectors)
        except MissingExtraError:
            return None

    def _products(self, queries: Floats, k: int) -> list[Numbers]:
        """Return candidates by products in float32."""
        # A single query is doubled, since a product with one vector takes longer than with two. The
        # vectors are the left factor, as BLAS is twice as fast so.
        rows = torch.from_numpy(queries if len(queries) > 1 else queries.repeat(2, axis=0)).T
        parts = [torch.from_numpy(block) @ rows for block in blocks(self._vectors)]
        scores = torch.cat(parts).T[: len(queries)]
        return [
            np.flatnonzero(row.numpy() >= float(row.topk(k).values[-1]) - most)
            for row, most in zip(scores, 2.0 * rounding(queries) * self._longest, strict=True)
        ]


class QuantizedScan:
    """A copy of vectors in 8 bits a number (`faiss.IndexScalarQuantizer`), a quarter of float32.

    Attributes:
        error: Length of the longest rounding error. By Cauchy-Schwarz it bounds the error of an
            inner product.

    Raises:
        MissingExtraError: faiss is missing.
    """

    def __init__(self, vectors: Floats) -> None:
        faiss = _faiss()
        kind, metric = faiss.ScalarQuantizer.QT_8bit, faiss.METRIC_INNER_PRODUCT
        self._index = faiss.IndexScalarQuantizer(vectors.shape[1], kind, metric)
        # faiss learns only the extremes of each dimension.
        ends = [end for b in blocks(vectors) for end in (b.min(axis=0), b.max(axis=0))]
        self._index.train(np.stack(ends))
        self.error = self._longest = 0.0
        for block in blocks(vectors):
            self._index.add(block)
            copy = self._index.reconstruct_n(self._index.ntotal - len(block), len(block))
            self.error = max(self.error, float(np.linalg.norm(block - copy, axis=1).max()))
            self._longest = max(self._longest, float(np.linalg.norm(copy, axis=1).max()))

    def candidates(self, queries: Floats, k: int) -> list[Numbers | None]:
        """Return the positions that may be among the k best; None for a query with too many."""
        count = min(max(SCANNED, 4 * k), self._index.ntotal)
        scores, numbers = self._index.search(queries, count)
        slack = 2.0 * (self.error * np.linalg.norm(queries, axis=1))
        least = scores[:, k - 1] - slack - 2.0 * rounding(queries) * self._longest
        whole = count == self._index.ntotal
        rows = zip(numbers, scores, least.tolist(), strict=True)
        return [ids[row >= bound] if whole or row[-1] < bound else None for ids, row, bound in rows]


def blocks(vectors: Floats) -> Iterator[Floats]:
    """Yield vectors in blocks of one product each."""
    for start in range(0, vectors.shape[0], BLOCK):
        yield vectors[start : start + BLOCK]


def rounding(queries: Floats) -> NDArray[np.float64]:
    """Return the largest error of sums in float32, for vectors of length one: [Q]."""
    norms = np.linalg.norm(queries.astype(np.float64), axis=1)
    return np.asarray((queries.shape[1] + 8) * 2.0**-24 * norms)


class Approximate:
    """An approximate index of faiss, HNSW: a graph of the vectors that differ.

    It examines the same vectors for every k up to SEARCHED, so a larger k changes no result. In a
    graph with copies of a vector, these may have no links but to each other.
    """

    kind = HNSW

    def __init__(self, index: Any, vectors: Floats) -> None:
        copies: dict[int, list[int]] = {}
        for position, vector in enumerate(vectors):
            copies.setdefault(hash(vector.tobytes()), []).append(position)
        self._index, self._copies = index, [*copies.values()]

    @classmethod
    def build(cls, vectors: Floats) -> Self:
        """Index vectors by their inner products; raise MissingExtraError without faiss."""
        faiss = _faiss()
        index = faiss.IndexHNSWFlat(vectors.shape[1], HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = HNSW_BUILT
        result = cls(index, vectors)
        index.add(vectors[[first for first, *_ in result._copies]])
        return result

    def candidates(self, queries: Floats, k: int) -> list[Numbers]:
        """Return the positions that the index finds, perhaps fewer than k."""
        most = max(k, SEARCHED)
        options = _faiss().SearchParametersHNSW(efSearch=most)
        _, numbers = self._index.search(queries, min(most, self._index.ntotal), params=options)
        rows = ([n for place in row if place >= 0 for n in self._copies[place]] for row in numbers)
        return [np.asarray(row, np.int64) for row in rows]

    def save(self, path: Path) -> None:
        """Write the index to a file."""
        _faiss().write_index(self._index, str(path))

    @classmethod
    def load(cls, path: Path, vectors: Floats) -> Self:
        """Read an index that `save` wrote over these vectors; raise StoreError for another file."""
        faiss = _faiss()
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise StoreError(
                f"{path.name} cannot be read by faiss ({error}); build the index again."
            ) from error
        result = cls(index, vectors)
        expected = len(result._copies), vectors.shape[1]
        if (index.ntotal, index.d) != expected:
            raise StoreError(
                f"{path.name} has {index.ntotal} vectors of {index.d} dimensions, expected "
                f"{expected[0]} of {expected[1]}; build the index again."
            )
        return result


Nearest = Exact | Approximate


def build_nearest(vectors: Floats, kind: str) -> Nearest:
    """Return a search over vectors, of one of KINDS."""
    return Exact(vectors) if kind == FLAT else Approximate.build(vectors)


def _faiss() -> ModuleType:
    """Import faiss; raise MissingExtraError if it is missing."""
    with optional_packages():
        import faiss
    return faiss
