"""The nearest of many vectors: exactly, or by an approximate index of faiss.

Both only name candidates; `DenseIndex` scores them again by one routine in float64, so that what is
found hangs neither on how many queries were asked at once nor on threads or kernels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray

from ragspec.errors import InputError, MissingExtraError, StoreError
from ragspec.models.packed import MOST_SHARE, available, free_memory, halves, packed, product
from ragspec.registry import for_extra
from ragspec.retrievers.indexes.node_heap_numba import load_numba

if TYPE_CHECKING:
    from ragspec.retrievers.search.rounded_numba import Rounded

Floats = NDArray[np.float32]
Numbers = NDArray[np.int64]

PACKED_FOR = 8  # queries that the packed copy is laid out for; it serves any number
BLOCK = 1 << 15  # vectors of one product
LEAST_HALVES = 1 << 14  # vectors from which on a copy in bfloat16 is worth its memory
READ_BEFORE = 1 << 25  # vectors read by searches before numba and a copy in bytes are paid back
GROUP = 64  # scores of which the largest stands for all when a threshold is looked for
CHUNK = GROUP * GROUP  # scores that stand close enough together to be read down their columns
NARROW = 4096  # candidates above which float32 narrows them further
# Rounding of products of unit vectors: inputs to 8 bits and once more the result; sums in float32.
HALF_ERROR = 2.0**-8 + 2.0**-9 + 2.0**-16
FLAT, KINDS = "exact", ("exact", "hnsw", "ivf")
SEARCHED = 128  # candidates that an approximate index looks at, at least, whatever k is
HNSW_LINKS, HNSW_BUILT = 32, 200
IVF_SHARE = 16  # one list in so many is searched
IVF_TRAINED = 64  # vectors for each list that the lists are learned from
SEED = 1234
MOST_ON_GPU = 2048  # lists and vectors that faiss's kernels choose at once


class Nearest(Protocol):
    """Names candidates for searches: the vectors of the largest inner products, and some more."""

    @property
    def kind(self) -> str:
        """One of KINDS."""
        ...

    @property
    def parameters(self) -> Mapping[str, int]:
        """What it was built with and searches with."""
        ...

    def candidates(self, queries: Floats, k: int) -> list[Numbers]:
        """Return positions for each query f32 [Q, dimensions], the k nearest among them."""
        ...


class Exact:
    """All inner products: candidates are whatever may be among the k largest, by an error bound.

    A pass over all vectors in lower precision gives scores that are off by at most e; the k-th
    largest of them less 2 e bounds what can be among the k best from below. On CPUs that multiply
    bfloat16 a packed copy in it (half the memory of the vectors) is read in half the time, and
    eight queries take hardly longer than one; elsewhere float32 does the same. Once much was
    searched, a copy in bytes (a quarter of the memory) takes its place, where numba is installed:
    a third of that time.
    """

    kind = FLAT
    parameters: Mapping[str, int] = MappingProxyType({})

    def __init__(self, vectors: Floats) -> None:
        self._vectors = torch.from_numpy(vectors)
        self._packed: list[torch.Tensor] | None = None
        self._rounded: Rounded | None = None
        self._before_rounding = READ_BEFORE
        norms = (float(block.norm(dim=1).max()) for block in self._blocks() if len(block))
        self._longest = max(norms, default=0.0)

    def candidates(self, queries: Floats, k: int) -> list[Numbers]:
        """Return the positions that may be among the k best of each query."""
        wanted = torch.from_numpy(np.ascontiguousarray(queries))
        if not len(self._vectors):
            return [np.zeros(0, np.int64) for _ in queries]
        scores, errors = self._products(wanted)
        return [
            self._narrowed(query, above(own, k, 2.0 * error), k)
            for own, query, error in zip(scores, wanted, errors, strict=True)
        ]

    def _products(self, queries: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        """Return products [Q, P], in some precision, and by how much each query's are off."""
        if (rounded := self._in_bytes()) is not None:
            return rounded.products(queries)
        if self._uses_halves():
            scores, share = self._halves(queries), HALF_ERROR
        else:
            scores, share = self._floats(queries), self._float_error
        errors: list[float] = (share * self._longest * queries.norm(dim=1).double()).tolist()
        return scores, errors

    @property
    def _float_error(self) -> float:
        return (self._vectors.shape[1] + 2) * 2.0**-24

    def _blocks(self) -> Iterator[torch.Tensor]:
        for start in range(0, len(self._vectors), BLOCK):
            yield self._vectors[start : start + BLOCK]

    def _floats(self, queries: torch.Tensor) -> torch.Tensor:
        """Return all products f32 [Q, P]. The vectors stand left: BLAS is twice as fast so."""
        # And two queries take less time than one, which would be a product with a vector.
        wanted = queries if len(queries) > 1 else queries.repeat(2, 1)
        return torch.cat([block @ wanted.T for block in self._blocks()]).T[: len(queries)]

    def _uses_halves(self) -> bool:
        """Tell whether the copy in bfloat16 is there, made at the first search with room for it."""
        if self._packed is None:
            room = self._vectors.numel() * 2 <= MOST_SHARE * free_memory()
            wanted = len(self._vectors) >= LEAST_HALVES and available() and halves()
            self._packed = [
                packed(block.bfloat16(), PACKED_FOR)
                for block in (self._blocks() if wanted and room else ())
            ]
        return bool(self._packed)

    def _in_bytes(self) -> Rounded | None:
        """Return the copy in bytes, made once enough was read, with numba and room for it."""
        if len(self._vectors) < LEAST_HALVES or self._before_rounding <= 0:
            return self._rounded
        self._before_rounding -= len(self._vectors)
        if self._before_rounding <= 0 and self._vectors.numel() <= MOST_SHARE * free_memory():
            try:
                load_numba()
            except MissingExtraError:
                return None
            from ragspec.retrievers.search.rounded_numba import Rounded as InBytes

            self._rounded = InBytes(self._blocks(), *self._vectors.shape)
            self._packed = None  # nothing reads it any more
        return self._rounded

    def _halves(self, queries: torch.Tensor) -> torch.Tensor:
        """Return all products bf16 [Q, P]."""
        rounded = queries.bfloat16()
        return torch.cat([product(rounded, block) for block in self._packed or ()], dim=1)

    def _narrowed(self, query: torch.Tensor, numbers: torch.Tensor, k: int) -> Numbers:
        """Return fewer of many candidates, by products in float32."""
        if len(numbers) > NARROW:
            parts = [self._vectors[part] @ query for part in torch.split(numbers, BLOCK)]
            slack = 2.0 * self._float_error * float(query.norm()) * self._longest
            numbers = numbers[above(torch.cat(parts), k, slack)]
        return np.asarray(numbers.numpy(), np.int64)


def above(scores: torch.Tensor, k: int, slack: float) -> torch.Tensor:
    """Return the places of scores [P] of at least the k-th largest less the slack, and maybe more.

    Of groups of scores the k-th largest maximum bounds the k-th largest score from below, and only
    groups whose maximum comes so far are looked into.
    """
    chunks = len(scores) // CHUNK
    if k > chunks * GROUP:
        least = float(scores.float().topk(min(k, len(scores))).values[-1]) - slack
        return (scores.float() >= least).nonzero()[:, 0]
    groups = scores[: CHUNK * chunks].view(chunks, GROUP, GROUP)  # a group is a column of a chunk
    largest = groups.amax(1).float()
    least = float(largest.flatten().topk(k).values[-1]) - slack
    chunk, column = (largest >= least).nonzero(as_tuple=True)
    chosen, row = (groups[chunk, :, column].float() >= least).nonzero(as_tuple=True)
    rest = (scores[CHUNK * chunks :].float() >= least).nonzero()[:, 0] + CHUNK * chunks
    return torch.cat([chunk[chosen] * CHUNK + row * GROUP + column[chosen], rest])


class Approximate:
    """An index of faiss over the same vectors: HNSW (a graph) or IVF (lists around centres).

    It looks at the same vectors for every k up to SEARCHED, so a larger k moves no answer. Lists
    are searched on the first GPU where faiss has one and their vectors fit there, by a copy.
    """

    def __init__(self, kind: str, index: Any, parameters: Mapping[str, int]) -> None:
        self.kind = kind
        self.parameters = MappingProxyType(dict(parameters))
        self._index = index
        self._gpu: tuple[Any, Any] | None = None  # the copy, and faiss's memory there

    @classmethod
    def build(cls, vectors: Floats, kind: str, *, distances: bool = False) -> Self:
        """Index vectors by their inner products, or by distances; raises MissingExtraError."""
        faiss = _faiss()
        metric = faiss.METRIC_L2 if distances else faiss.METRIC_INNER_PRODUCT
        count, width = vectors.shape
        if kind == "hnsw":
            index = faiss.IndexHNSWFlat(width, HNSW_LINKS, metric)
            index.hnsw.efConstruction = HNSW_BUILT
            parameters = {"links": HNSW_LINKS, "built": HNSW_BUILT, "searched": SEARCHED}
        else:
            lists = max(1, min(round(4 * math.sqrt(count)), count // 4))
            centres = faiss.IndexFlat(width, metric)
            index = faiss.IndexIVFFlat(centres, width, lists, metric)
            index.own_fields = True
            centres.this.disown()
            index.cp.seed = SEED
            index.cp.min_points_per_centroid = 1  # no remark on small collections
            index.train(_sample(vectors, lists * IVF_TRAINED))
            parameters = {"lists": lists, "searched": max(1, lists // IVF_SHARE), "seed": SEED}
        index.add(vectors)
        return cls(kind, index, parameters)

    @property
    def by_distance(self) -> bool:
        """Whether it goes by distances, and not by inner products."""
        return bool(self._index.metric_type == _faiss().METRIC_L2)

    def candidates(self, queries: Floats, k: int) -> list[Numbers]:
        """Return the positions that the index finds; fewer where it reaches fewer."""
        faiss, most = _faiss(), max(k, SEARCHED)
        count = min(most, self._index.ntotal)
        if self.kind == "hnsw":
            options = faiss.SearchParametersHNSW(efSearch=most)
        elif (copy := self._on_gpu(most)) is not None:
            # Alone, for kernels go by the size of the batch: a neighbour must move no answer.
            found = np.concatenate([copy.search(query[None], count)[1] for query in queries])
            return [row[row >= 0] for row in found]
        else:
            options = faiss.SearchParametersIVF(nprobe=self.parameters["searched"])
        _, found = self._index.search(queries, count, params=options)
        return [row[row >= 0] for row in found]

    def _on_gpu(self, most: int) -> Any | None:
        """Return a copy on the first GPU, made when first asked for; None where it cannot serve."""
        faiss = _faiss()
        if max(most, self.parameters["searched"]) > MOST_ON_GPU or not _gpus(faiss):
            return None
        if self._gpu is None:
            memory = faiss.StandardGpuResources()
            try:
                copy = faiss.index_cpu_to_gpu(memory, 0, self._index)
                copy.nprobe = self.parameters["searched"]
            except RuntimeError:  # too little memory there
                copy = None
            self._gpu = copy, memory
        return self._gpu[0]

    def save(self, path: Path) -> None:
        """Write the index to a file."""
        _faiss().write_index(self._index, str(path))

    @classmethod
    def load(cls, path: Path, kind: str, parameters: Mapping[str, int], vectors: Floats) -> Self:
        """Read what `save` wrote over these vectors; raises StoreError for anything else."""
        faiss = _faiss()
        try:
            index = faiss.read_index(str(path))
        except RuntimeError as error:
            raise StoreError(
                f"{path.name} cannot be read by faiss ({error}); build the index again."
            ) from error
        if (index.ntotal, index.d) != vectors.shape:
            raise StoreError(
                f"{path.name} has {index.ntotal} vectors of {index.d} dimensions, expected "
                f"{vectors.shape[0]} of {vectors.shape[1]}; build the index again."
            )
        return cls(kind, index, parameters)


def build_nearest(vectors: Floats, kind: str) -> Nearest:
    """Return what searches vectors, by its kind; raises InputError for an unknown one."""
    if kind not in KINDS:
        raise InputError(f"dense is {kind!r}; expected one of {', '.join(KINDS)}.")
    return Exact(vectors) if kind == FLAT else Approximate.build(vectors, kind)


def _faiss() -> Any:
    """Import faiss; raises MissingExtraError where it is missing."""
    try:
        import faiss
    except ModuleNotFoundError as error:
        raise for_extra(error) from error
    return faiss


def _gpus(faiss: Any) -> int:
    """Return the GPUs that this build of faiss can use."""
    return int(faiss.get_num_gpus()) if hasattr(faiss, "index_cpu_to_gpu") else 0


def _sample(vectors: Floats, most: int) -> Floats:
    """Return some of the vectors, always the same ones."""
    if len(vectors) <= most:
        return vectors
    chosen = np.random.default_rng(SEED).choice(len(vectors), most, replace=False)
    return vectors[np.sort(chosen)]
