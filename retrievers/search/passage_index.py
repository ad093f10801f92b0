"""The passage index: documents, their passages, and what searches them, in memory or on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.search.dense import (
    DEFAULT_EMBEDDER,
    DenseIndex,
    Embedder,
    StaticEmbedder,
    load_embedder,
)
from ragspec.retrievers.search.documents import Document, ProgressCallback
from ragspec.retrievers.search.fusion import (
    CANDIDATES,
    EQUAL,
    STATIC,
    Fusion,
    Hit,
    Ranking,
    SearchMode,
    fuse_rankings,
)
from ragspec.retrievers.search.nearest import FLAT, KINDS, Approximate, Exact, Floats, Nearest
from ragspec.retrievers.search.passages import WORDS, Passage, split_documents
from ragspec.retrievers.search.sparse import SparseIndex, Support
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, is_store, open_store, publish

KIND = "passages"
NEAREST = "nearest.faiss"
Ranked = tuple[int, float, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Query:
    """A text that is searched for, embedded once; vector f32 [dimensions], None without dense."""

    text: str
    vector: Floats | None = None


@dataclass(frozen=True, slots=True)
class IndexOrigin:
    """How an index came to be.

    paths: files and folders that were read. removed: files of them that were taken out. words: of
    a passage, about.
    """

    paths: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    words: int = WORDS

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> IndexOrigin:
        """Return what was recorded; nothing in indexes of before."""
        paths = tuple(map(str, record.get("paths", ())))
        removed = tuple(map(str, record.get("removed", ())))
        return cls(paths, removed, int(record.get("words", WORDS)))


class PassageIndex:
    """Documents cut into P passages, searched by meaning, by words, or by both.

    Read-only after building; several threads may search it.
    """

    def __init__(
        self,
        documents: Sequence[Document],
        passages: Sequence[Passage],
        *,
        dense: DenseIndex | None,
        sparse: SparseIndex | None,
        fusion: Fusion | None = None,
        origin: IndexOrigin | None = None,
    ) -> None:
        if dense is None and sparse is None:
            raise InputError("An index needs a dense or a sparse part; got neither.")
        if not passages:
            raise InputError("An index needs at least one passage; the documents gave none.")
        self.documents = tuple(documents)
        self.passages = tuple(passages)
        self.dense = dense
        self.sparse = sparse
        self.fusion = fusion or fusion_for(dense.embedder if dense else None)
        self.origin = origin or IndexOrigin()

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        *,
        words: int = WORDS,
        embedder: str | Path | Embedder | None = DEFAULT_EMBEDDER,
        dense: str = FLAT,
        sparse: bool = True,
        fusion: Fusion | None = None,
        paths: Iterable[str | os.PathLike[str]] = (),
        on_progress: ProgressCallback = lambda what, done, total: None,
    ) -> PassageIndex:
        """Cut documents into passages of about `words` words and index them.

        Args:
            fusion: How both rankings are joined, None for what suits the embedder. embedder None
                leaves dense search out, sparse=False leaves BM25 out.
            dense: "exact", or "hnsw" or "ivf", approximate indexes of faiss for many passages.
            paths: What was read, recorded for `upkeep.refresh`.
            on_progress: Called with the progress.

        Raises:
            InputError: Where nothing is left to search with or to search in, and the errors of
                `load_embedder`.
        """
        if dense not in KINDS:
            raise InputError(f"dense is {dense!r}; expected one of {', '.join(KINDS)}.")
        documents = tuple(documents)
        passages = split_documents(documents, words)
        texts = [searched_text(documents[p.document], p) for p in passages]
        by_meaning = None
        if embedder is not None:
            model = load_embedder(embedder)
            by_meaning = DenseIndex.build(texts, model, kind=dense, on_progress=on_progress)
        on_progress("indexing words", 0, len(texts))
        return cls(
            documents,
            passages,
            dense=by_meaning,
            sparse=SparseIndex.build(texts) if sparse and texts else None,
            fusion=fusion,
            origin=IndexOrigin(tuple(os.path.abspath(path) for path in paths), words=words),
        )

    def rebuilt(
        self,
        documents: Iterable[Document],
        origin: IndexOrigin,
        on_progress: ProgressCallback = lambda what, done, total: None,
    ) -> PassageIndex:
        """Return an index of other documents; what is the same in both is not embedded again."""
        documents = tuple(documents)
        passages = split_documents(documents, origin.words)
        texts = [searched_text(documents[p.document], p) for p in passages]
        dense = None
        if self.dense is not None:
            old = [searched_text(self.documents[p.document], p) for p in self.passages]
            known = dict(zip(old, self.dense.vectors, strict=True))
            model, kind = self.dense.embedder, self.dense.nearest.kind
            dense = DenseIndex.build(texts, model, kind=kind, known=known, on_progress=on_progress)
        on_progress("indexing words", 0, len(texts))
        sparse = SparseIndex.build(texts) if self.sparse is not None and texts else None
        return PassageIndex(
            documents, passages, dense=dense, sparse=sparse, fusion=self.fusion, origin=origin
        )

    @property
    def mode(self) -> SearchMode:
        """The best search that this index can do."""
        if self.dense is None:
            return SearchMode.SPARSE
        return SearchMode.DENSE if self.sparse is None else SearchMode.FUSED

    def search(self, query: str, k: int = 5, mode: SearchMode | str | None = None) -> list[Hit]:
        """Return the k best passages for a query; raises InputError for an empty query or k < 1."""
        if not query.strip():
            raise InputError("The query is empty; ask something.")
        chosen = SearchMode(mode or self.mode)
        ranked = self.ranked([self.query(query, chosen)], k, chosen)[0]
        return [hit for _, hit in self.hits(ranked)]

    def check(self, mode: SearchMode) -> None:
        """Raise InputError where the index lacks a part that a mode needs."""
        if mode is not SearchMode.SPARSE:
            _ = self._dense
        if mode is not SearchMode.DENSE:
            _ = self._sparse

    def query(self, text: str, mode: SearchMode) -> Query:
        """Return a text ready to be searched for."""
        if mode is SearchMode.SPARSE:
            return Query(text)
        return Query(text, self._dense.embed([text])[0])

    def ranked(self, queries: Sequence[Query], k: int, mode: SearchMode) -> list[list[Ranked]]:
        """Return the k best passages of each query as (number, score, rank in each list).

        What is found for a query depends on no other query and on no larger k.

        Raises:
            InputError: For k < 1, and where the index lacks a part that the mode needs.
        """
        if k < 1:
            raise InputError(f"{k} passages were asked for, expected at least 1.")
        depth = max(k, CANDIDATES) if mode is SearchMode.FUSED else k
        lists: list[dict[str, Ranking]] = [{} for _ in queries]
        if mode is not SearchMode.SPARSE:
            vectors = [query.vector for query in queries if query.vector is not None]
            for current, ranking in zip(
                lists, self._dense.search_vectors(np.stack(vectors), depth), strict=True
            ):
                current["dense"] = ranking
        if mode is not SearchMode.DENSE:
            for current, query in zip(lists, queries, strict=True):
                current["sparse"] = self._sparse.search(query.text, depth)
        return [fuse_rankings(local, self.fusion)[:k] for local in lists]

    def best_of(self, query: Query, numbers: Sequence[int], mode: SearchMode) -> int | None:
        """Return the best of some passages (ascending numbers) by the scores of a search.

        None where a search would find none of them.
        """
        rankings: dict[str, Ranking] = {}
        if mode is not SearchMode.SPARSE and query.vector is not None:
            rankings["dense"] = _ordered(
                numbers, self._dense.scores(query.vector, numbers).tolist()
            )
        if mode is not SearchMode.DENSE:
            ranking = _ordered(numbers, self._sparse.scores(query.text, numbers))
            rankings["sparse"] = [(number, score) for number, score in ranking if score > 0]
        best = fuse_rankings(rankings, self.fusion)[:1]
        return best[0][0] if best else None

    def hits(self, ranked: Sequence[Ranked]) -> list[tuple[int, Hit]]:
        """Return what was ranked, as (number, hit)."""
        return [
            (number, Hit(self.documents[passage.document], passage, score, ranks))
            for number, score, ranks in ranked
            for passage in (self.passages[number],)
        ]

    def support(self, query: str, hits: Sequence[Hit] | None = None) -> Support:
        """Return what the best passages have of a query; hits: those that a search found."""
        hits = self.search(query) if hits is None else hits
        coverage = cosine = None
        if self.sparse is not None:
            texts = [searched_text(hit.document, hit.passage) for hit in hits]
            coverage = self.sparse.coverage(query, texts)
        if self.dense is not None:
            cosine = max((score for _, score in self.dense.search(query, 1)), default=0.0)
        return Support(coverage, cosine)

    @property
    def _dense(self) -> DenseIndex:
        return self.dense or self._lacks("dense")

    @property
    def _sparse(self) -> SparseIndex:
        return self.sparse or self._lacks("sparse")

    def _lacks(self, name: str) -> NoReturn:
        raise InputError(
            f"This index has no {name} part; build it with one, or search {self.mode}."
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a folder, as a whole or not at all; raises StoreError."""
        contents = self.contents()
        publish(
            Path(path),
            KIND,
            self.write,
            parameters=contents.parameters,
            fingerprints=contents.fingerprints,
        )

    def contents(self) -> Contents:
        """Return what the manifest of a saved index says of it."""
        parameters = {
            "documents": len(self.documents),
            "passages": len(self.passages),
            "embedder": self.dense.embedder.name if self.dense else None,
            "dense": _described(self.dense),
            "sparse": self.sparse is not None,
            "fusion": asdict(self.fusion),
            "origin": asdict(self.origin),
        }
        fingerprints = {"embedder": self.dense.embedder.fingerprint} if self.dense else {}
        return Contents(parameters, fingerprints)

    def write(self, folder: Path) -> None:
        """Write the files of the index into a folder, for `publish`."""
        write_lines(folder / "documents.jsonl", [asdict(document) for document in self.documents])
        spans = [[p.document, p.start, p.end] for p in self.passages]
        np.save(folder / "passages.npy", np.asarray(spans, np.int64), allow_pickle=False)
        write_lines(folder / "titles.jsonl", [passage.title for passage in self.passages])
        if self.dense is not None:
            np.save(folder / "vectors.npy", self.dense.vectors, allow_pickle=False)
            if isinstance(self.dense.nearest, Approximate):
                self.dense.nearest.save(folder / NEAREST)
        if self.sparse is not None:
            self.sparse.save(folder / "sparse")

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        embedder: str | Path | Embedder | None = None,
        verify: Verify = "full",
    ) -> PassageIndex:
        """Open an index that `save` wrote.

        Args:
            embedder: Overrides the name that was recorded (it must be the same model: the
                fingerprint is compared).

        Raises:
            StoreError: Where the index is missing, damaged or was made with another embedder, and
                the errors of `load_embedder`.
        """
        store = open_index(Path(path), verify)
        try:
            return cls._read(store, embedder)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            if isinstance(error, StoreError) or "ragspec" in type(error).__module__:
                raise
            raise StoreError(f"{path} cannot be read ({error}); build it again.") from error

    @classmethod
    def _read(cls, store: OpenStore, embedder: str | Path | Embedder | None) -> PassageIndex:
        parameters = store.manifest.parameters
        documents = [read_document(line) for line in read_lines(store.file("documents.jsonl"))]
        spans = np.load(store.file("passages.npy"), allow_pickle=False).tolist()
        titles = read_lines(store.file("titles.jsonl"))
        passages = [
            Passage(number, start, end, title, documents[number].text[start:end])
            for (number, start, end), title in zip(spans, titles, strict=True)
        ]
        dense, fusion = None, Fusion(**parameters["fusion"])
        if parameters["embedder"] is not None:
            model = load_embedder(embedder or parameters["embedder"])
            store.expect("embedder", model.fingerprint)
            vectors = np.load(store.file("vectors.npy"), allow_pickle=False)
            dense = DenseIndex(vectors, model, _nearest(store, vectors))
        sparse = SparseIndex.load(store.path / "sparse") if parameters["sparse"] else None
        origin = IndexOrigin.of(parameters.get("origin", {}))
        return cls(documents, passages, dense=dense, sparse=sparse, fusion=fusion, origin=origin)


def _described(dense: DenseIndex | None) -> dict[str, Any] | None:
    """Return what a manifest says of the index over the vectors."""
    if dense is None:
        return None
    return {"kind": dense.nearest.kind, **dense.nearest.parameters}


def _nearest(store: OpenStore, vectors: Floats) -> Nearest:
    """Return the index over the vectors of a store; those of before are searched exactly."""
    said = dict(store.manifest.parameters.get("dense") or {"kind": FLAT})
    kind = said.pop("kind")
    if kind not in KINDS:
        raise StoreError(
            f"{store.path} has a dense index of kind {kind!r}, expected one of {', '.join(KINDS)}; "
            "it may be of a later ragspec. Build it again."
        )
    if kind == FLAT:
        return Exact(np.ascontiguousarray(vectors))
    return Approximate.load(store.file(NEAREST), kind, said, vectors)


def _ordered(numbers: Sequence[int], scores: Sequence[float]) -> Ranking:
    """Return numbers with their scores, best first, of equal ones the lower number."""
    return sorted(zip(numbers, scores, strict=True), key=lambda pair: (-pair[1], pair[0]))


def open_index(path: Path, verify: Verify) -> OpenStore:
    """Return the store of an index; raises StoreError where there is none, or a damaged one."""
    if not is_store(path):
        what = "holds no index" if path.exists() else "is missing"
        raise StoreError(
            f"{path} {what}; expected one, as `ragspec index PATHS --out INDEX` builds it."
        )
    return open_store(path, KIND, verify=verify)


def fusion_for(embedder: Embedder | None) -> Fusion:
    """Return how this embedder's ranking is joined with BM25's where the user does not say."""
    return STATIC if isinstance(embedder, StaticEmbedder) else EQUAL


def searched_text(document: Document, passage: Passage) -> str:
    """Return what is indexed for a passage: the document's title, the heading, and the text."""
    titles = dict.fromkeys((document.title, passage.title))
    return "\n".join([*titles, passage.text])


def read_document(record: dict[str, Any]) -> Document:
    """Make a document of its JSON record."""
    headings = tuple((int(offset), str(title)) for offset, title in record.pop("headings"))
    pages = tuple(int(offset) for offset in record.pop("pages", ()))
    return Document(**record, headings=headings, pages=pages)


def write_lines(path: Path, records: Iterable[Any]) -> None:
    """Write one JSON value per line."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_text("".join(lines), encoding="utf-8", newline="")


def read_lines(path: Path) -> list[Any]:
    """Read one JSON value per line."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
