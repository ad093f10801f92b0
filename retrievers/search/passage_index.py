"""The passage index: documents, their passages, and what searches them, in memory or on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.search.dense import (
    DEFAULT_EMBEDDER,
    DenseIndex,
    Embedder,
    StaticEmbedder,
    load_embedder,
)
from ragspec.retrievers.search.documents import Document, Told
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
from ragspec.retrievers.search.passages import WORDS, Passage, split_documents
from ragspec.retrievers.search.sparse import SparseIndex
from ragspec.retrievers.search.support import Support
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, is_store, open_store, publish

KIND = "passages"


@dataclass(frozen=True, slots=True)
class Origin:
    """How an index came to be.

    paths: files and folders that were read. removed: files of them that were taken out. words: of
    a passage, about.
    """

    paths: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    words: int = WORDS

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Origin:
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
        origin: Origin | None = None,
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
        self.origin = origin or Origin()

    @classmethod
    def build(
        cls,
        documents: Iterable[Document],
        *,
        words: int = WORDS,
        embedder: str | Path | Embedder | None = DEFAULT_EMBEDDER,
        sparse: bool = True,
        fusion: Fusion | None = None,
        paths: Iterable[str | os.PathLike[str]] = (),
        told: Told = lambda what, done, total: None,
    ) -> PassageIndex:
        """Cut documents into passages of about `words` words and index them.

        fusion: how both rankings are joined, None for what suits the embedder. embedder None
        leaves dense search out, sparse=False leaves BM25 out. paths: what was read, recorded for
        `upkeep.refresh`. told: hears how far it is. Raises InputError where nothing is left to
        search with or to search in, and the errors of `load_embedder`.
        """
        documents = tuple(documents)
        passages = split_documents(documents, words)
        texts = [searched_text(documents[p.document], p) for p in passages]
        dense = None
        if embedder is not None:
            dense = DenseIndex.build(texts, load_embedder(embedder), told=told)
        told("indexing words", 0, len(texts))
        return cls(
            documents,
            passages,
            dense=dense,
            sparse=SparseIndex.build(texts) if sparse and texts else None,
            fusion=fusion,
            origin=Origin(tuple(os.path.abspath(path) for path in paths), words=words),
        )

    def rebuilt(
        self,
        documents: Iterable[Document],
        origin: Origin,
        told: Told = lambda what, done, total: None,
    ) -> PassageIndex:
        """Return an index of other documents; what is the same in both is not embedded again."""
        documents = tuple(documents)
        passages = split_documents(documents, origin.words)
        texts = [searched_text(documents[p.document], p) for p in passages]
        dense = None
        if self.dense is not None:
            old = [searched_text(self.documents[p.document], p) for p in self.passages]
            known = dict(zip(old, self.dense.vectors, strict=True))
            dense = DenseIndex.build(texts, self.dense.embedder, known=known, told=told)
        told("indexing words", 0, len(texts))
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
        if k < 1:
            raise InputError(f"{k} passages were asked for, expected at least 1.")
        ranked = fuse_rankings(self.rankings(query, k, SearchMode(mode or self.mode)), self.fusion)
        return [
            Hit(self.documents[self.passages[number].document], self.passages[number], score, ranks)
            for number, score, ranks in ranked[:k]
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

    def rankings(self, query: str, k: int, mode: SearchMode) -> dict[str, Ranking]:
        """Return the lists that a search of this mode joins."""
        depth = max(k, CANDIDATES) if mode is SearchMode.FUSED else k
        found: dict[str, Ranking] = {}
        if mode is not SearchMode.SPARSE:
            found["dense"] = self._part(self.dense, "dense").search(query, depth)
        if mode is not SearchMode.DENSE:
            found["sparse"] = self._part(self.sparse, "sparse").search(query, depth)
        return found

    def _part(self, part: Any, name: str) -> Any:
        if part is None:
            raise InputError(
                f"This index has no {name} part; build it with one, or search {self.mode}."
            )
        return part

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

        embedder: overrides the name that was recorded (it must be the same model: the fingerprint
        is compared). Raises StoreError where the index is missing, damaged or was made with
        another embedder, and the errors of `load_embedder`.
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
            dense = DenseIndex(np.load(store.file("vectors.npy"), allow_pickle=False), model)
        sparse = SparseIndex.load(store.path / "sparse") if parameters["sparse"] else None
        origin = Origin.of(parameters.get("origin", {}))
        return cls(documents, passages, dense=dense, sparse=sparse, fusion=fusion, origin=origin)


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
