"""The passage index: documents and their passages with dense and sparse search, saved or not."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, Self

import numpy as np

from ragspec.engine.prompts import well_formed
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.fingerprints import check_prints
from ragspec.retrievers.search.dense import (
    DEFAULT_EMBEDDER,
    DenseIndex,
    EmbedderSpec,
    StaticEmbedder,
    load_embedder,
)
from ragspec.retrievers.search.documents import Collection, Document, ProgressCallback
from ragspec.retrievers.search.fusion import EQUAL, STATIC, Hit, Ranking, SearchMode, fuse_rankings
from ragspec.retrievers.search.nearest import FLAT, KINDS, Approximate, Floats
from ragspec.retrievers.search.passages import WORDS, Passage, split_document
from ragspec.retrievers.search.reranker import RERANKED, Reranker, rerank
from ragspec.retrievers.search.sparse import FILES, SparseIndex
from ragspec.sampling.settings import checked_count
from ragspec.storage.filesystem import expect_path
from ragspec.storage.manifest import Contents, Verify
from ragspec.storage.store import OpenStore, is_store, open_store, parsing, publish

KIND = "passages"
NEAREST = "nearest.faiss"
CANDIDATES = 100  # fewest results of each list of a fusion
Ranked = tuple[int, float, dict[str, int]]


@dataclass(frozen=True, slots=True)
class Query:
    """A query, embedded once as f32 [dimensions]; the vector is None without dense search."""

    text: str
    vector: Floats | None = None


@dataclass(frozen=True, slots=True)
class IndexOrigin:
    """The origin of an index.

    Attributes:
        paths: Files and folders that were read.
        removed: Files below these that were removed again.
        words: Approximate words of a passage.
    """

    paths: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    words: int = WORDS

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Self:
        """Return the recorded origin."""
        return cls(tuple(record["paths"]), tuple(record["removed"]), int(record["words"]))


class PassageIndex:
    """Documents cut into P passages, with dense search, sparse search, or both.

    It is read-only after building; several threads may search it.

    Attributes:
        reranker: Orders the first hits of `search` anew, see `CrossEncoder`; None for none.
    """

    reranker: Reranker | None = None

    def __init__(
        self,
        documents: Sequence[Document],
        passages: Sequence[Passage],
        *,
        dense: DenseIndex | None,
        sparse: SparseIndex | None,
        origin: IndexOrigin | None = None,
    ) -> None:
        if not passages:
            raise InputError("An index needs at least one passage; the documents gave none.")
        if dense is None and sparse is None:
            raise InputError("An index needs a dense or a sparse part; got neither.")
        self.documents = tuple(documents)
        self.passages = tuple(passages)
        self.dense, self.sparse = dense, sparse
        self.fusion = STATIC if dense and isinstance(dense.embedder, StaticEmbedder) else EQUAL
        self.origin = origin or IndexOrigin()

    @classmethod
    def build(
        cls,
        documents: Iterable[Document] | Collection,
        *,
        words: int = WORDS,
        embedder: EmbedderSpec = DEFAULT_EMBEDDER,
        dense: str = FLAT,
        sparse: bool = True,
        known: Mapping[str, Floats] = MappingProxyType({}),
        on_progress: ProgressCallback = lambda what, done, total: None,
    ) -> Self:
        """Cut documents into passages of about `words` words and index them.

        Args:
            documents: Documents, or what `load_documents` read: `upkeep.refresh` reads its files
                and folders again.
            embedder: Name, folder or model of the embedder; None leaves dense search out.
            dense: "exact", or "hnsw", an approximate index of faiss for many passages.
            sparse: Whether to index words for BM25.
            on_progress: Called with the stage, the passages done, and all passages.

        Raises:
            InputError: `dense` is unknown, both searches are off, or there are no passages. Errors
                of `load_embedder` pass through.
        """
        if dense not in KINDS:
            raise InputError(f"dense is {dense!r}; expected {' or '.join(KINDS)}.")
        paths: tuple[str, ...] = ()
        if isinstance(documents, Collection):
            paths = tuple(map(os.path.abspath, documents.paths))
            documents = documents.documents
        documents = tuple(documents) if isinstance(documents, Iterable) else documents
        if not isinstance(documents, tuple) or not all(isinstance(x, Document) for x in documents):
            raise InputError(f"got {documents!r:.80} as documents; expected a list of Document.")
        passages = [p for n, each in enumerate(documents) for p in split_document(each, n, words)]
        texts = [searched_text(documents[p.document], p) for p in passages]
        index = None
        if embedder is not None and texts:
            model = load_embedder(embedder)
            index = DenseIndex.build(texts, model, kind=dense, known=known, on_progress=on_progress)
        on_progress("indexing words", 0, len(texts))
        titles = [documents[passage.document].title for passage in passages]
        return cls(
            documents,
            passages,
            dense=index,
            sparse=SparseIndex.build(texts, titles) if sparse and texts else None,
            origin=IndexOrigin(paths, words=words),
        )

    def rebuilt(
        self,
        documents: Iterable[Document],
        origin: IndexOrigin,
        on_progress: ProgressCallback = lambda what, done, total: None,
    ) -> Self:
        """Return an index of other documents; passages of this index are not embedded again."""
        options: dict[str, Any] = {"embedder": None}
        if (dense := self.dense) is not None:
            texts = (searched_text(self.documents[p.document], p) for p in self.passages)
            known = dict(zip(texts, dense.vectors, strict=True))
            options = {"embedder": dense.embedder, "dense": dense.nearest.kind, "known": known}
        options |= {"sparse": self.sparse is not None, "on_progress": on_progress}
        index = self.build(documents, words=origin.words, **options)
        index.origin = origin
        return index

    @property
    def mode(self) -> SearchMode:
        """The mode that uses all parts of this index."""
        if self.dense is None:
            return SearchMode.SPARSE
        return SearchMode.DENSE if self.sparse is None else SearchMode.FUSED

    def search(self, query: str, k: int = 5, mode: SearchMode | str | None = None) -> list[Hit]:
        """Return the k best passages for a query.

        Raises:
            InputError: The query is empty, k is below 1, or the index lacks a part that `mode`
                needs.
        """
        if not isinstance(query, str) or not query.strip():
            raise InputError(f"The query is empty or no text ({query!r}); ask something.")
        chosen, k = SearchMode(mode or self.mode), checked_count(k, "k")
        most = k if self.reranker is None else max(k, RERANKED)
        checked = self.query(query, chosen)
        hits = [self.hit(*each) for each in self.ranked([checked], most, chosen)[0]]
        return hits if self.reranker is None else rerank(self.reranker, checked.text, hits)[:k]

    def check(self, mode: SearchMode) -> None:
        """Raise InputError if the index lacks a part that a mode needs."""
        if mode is not SearchMode.SPARSE:
            _ = self._dense
        if mode is not SearchMode.DENSE:
            _ = self._sparse

    def query(self, text: str, mode: SearchMode) -> Query:
        """Return a query, embedded if the mode needs it, of well-formed text."""
        text = well_formed(text)
        vector = None if mode is SearchMode.SPARSE else self._dense.embed([text])[0]
        return Query(text, vector)

    def ranked(self, queries: Sequence[Query], k: int, mode: SearchMode) -> list[list[Ranked]]:
        """Return the k best passages of each query as (number, score, rank in each list).

        A result depends neither on the other queries nor on a larger k, up to CANDIDATES.

        Raises:
            InputError: k is below 1, or the index lacks a part that the mode needs.
        """
        k = checked_count(k, "k")
        depth = max(k, CANDIDATES) if mode is SearchMode.FUSED else k
        lists: list[dict[str, Ranking]] = [{} for _ in queries]
        if mode is not SearchMode.SPARSE:
            vectors = [query.vector for query in queries if query.vector is not None]
            dense = self._dense.search_vectors(np.stack(vectors), depth)
            for rankings, ranking in zip(lists, dense, strict=True):
                rankings["dense"] = ranking
        if mode is not SearchMode.DENSE:
            for rankings, query in zip(lists, queries, strict=True):
                rankings["sparse"] = self._sparse.search(query.text, depth)
        return [fuse_rankings(rankings, self.fusion)[:k] for rankings in lists]

    def best_of(self, query: Query, numbers: Sequence[int], mode: SearchMode) -> int | None:
        """Return the best of some passages (ascending numbers) by the scores of a search.

        It is None if a search would find none of them.
        """
        rankings: dict[str, Ranking] = {}
        if mode is not SearchMode.SPARSE and query.vector is not None:
            cosines = self._dense.scores(query.vector, numbers).tolist()
            rankings["dense"] = [*zip(numbers, cosines, strict=True)]
        if mode is not SearchMode.DENSE:
            scores = self._sparse.scores(query.text)[numbers].tolist()
            rankings["sparse"] = [(n, s) for n, s in zip(numbers, scores, strict=True) if s > 0]
        for ranking in rankings.values():
            ranking.sort(key=lambda pair: -pair[1])  # equal scores stay in the order of numbers
        best = fuse_rankings(rankings, self.fusion)[:1]
        return best[0][0] if best else None

    def hit(self, number: int, score: float, ranks: Mapping[str, int]) -> Hit:
        """Return a ranked passage as a hit."""
        passage = self.passages[number]
        return Hit(self.documents[passage.document], passage, score, ranks)

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

    def save(self, path: str | os.PathLike[str], *, replace: bool = True) -> None:
        """Write the index to a folder, as a whole or not at all.

        Raises:
            InputError: An index is there, and `replace` is false.
            StoreError: The folder is of another kind or cannot be written.
        """
        publish(expect_path(path, "the index"), KIND, self.write, replace=replace)

    def write(self, folder: Path) -> Contents:
        """Write the files of the index into a folder, for `publish`; return its contents."""
        write_lines(folder / "documents.jsonl", [asdict(document) for document in self.documents])
        spans = [[p.document, p.start, p.end] for p in self.passages]
        np.save(folder / "passages.npy", np.asarray(spans, np.int64), allow_pickle=False)
        write_lines(folder / "titles.jsonl", [passage.title for passage in self.passages])
        if (dense := self.dense) is not None:
            np.save(folder / "vectors.npy", dense.vectors, allow_pickle=False)
            if isinstance(dense.nearest, Approximate):
                dense.nearest.save(folder / NEAREST)
        if self.sparse is not None:
            self.sparse.save(folder / "sparse")
        parameters = {
            "documents": len(self.documents),
            "passages": len(self.passages),
            "embedder": dense.embedder.name if dense else None,
            "dense": {"kind": dense.nearest.kind} if dense else None,
            "sparse": self.sparse is not None,
            "origin": asdict(self.origin),
        }
        return Contents(parameters, {"embedder": dense.embedder.fingerprint} if dense else {})

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, embedder: EmbedderSpec = None, verify: Verify = "full"
    ) -> Self:
        """Open an index that `save` wrote.

        Args:
            embedder: Overrides the recorded name; its fingerprint must be that of the same model.
            verify: "full" hashes every file, "size" compares sizes only.

        Raises:
            StoreError: The index is missing, damaged, or made with another embedder. Errors of
                `load_embedder` pass through.
        """
        store = open_index(path, verify)
        with parsing(Path(path)):
            parameters = store.manifest.parameters
            documents = [read_document(line) for line in read_lines(store.file("documents.jsonl"))]
            spans = np.load(store.file("passages.npy"), allow_pickle=False).tolist()
            titles = read_lines(store.file("titles.jsonl"))
            passages = [
                Passage(number, start, end, title, documents[number].text[start:end])
                for (number, start, end), title in zip(spans, titles, strict=True)
            ]
            dense = sparse = None
            if parameters["embedder"] is not None:
                dense = _read_dense(store, embedder)
            if parameters["sparse"]:
                (folder,) = {store.file(f"sparse/{name}").parent for name in FILES}
                sparse = SparseIndex.load(folder)
            origin = IndexOrigin.of(parameters["origin"])
            return cls(documents, passages, dense=dense, sparse=sparse, origin=origin)


def _read_dense(store: OpenStore, embedder: EmbedderSpec) -> DenseIndex:
    """Return the dense index of a store, whose vectors are those of the embedder."""
    parameters, prints = store.manifest.parameters, store.manifest.fingerprints
    model = load_embedder(embedder or parameters["embedder"])
    check_prints(str(store.path.parent), prints, {"embedder": model.fingerprint})
    vectors = np.load(store.file("vectors.npy"), allow_pickle=False)
    kind = parameters["dense"]["kind"]
    if kind not in KINDS:
        raise StoreError(
            f"{store.path} has a dense index of kind {kind!r}, expected {' or '.join(KINDS)}; "
            "it may be of a later ragspec. Build it again."
        )
    nearest = None if kind == FLAT else Approximate.load(store.file(NEAREST), vectors)
    return DenseIndex(vectors, model, nearest)


def open_index(path: str | os.PathLike[str], verify: Verify) -> OpenStore:
    """Return the store of an index; raise StoreError if there is none, or a damaged one."""
    path = expect_path(path, "the index")
    if not is_store(path):
        what = "holds no index" if path.exists() else "is missing"
        raise StoreError(f"{path} {what}; expected one, as `ragspec index build` makes it.")
    return open_store(path, KIND, verify=verify)


def searched_text(document: Document, passage: Passage) -> str:
    """Return the text to index for a passage, with the document's title and the heading."""
    return well_formed("\n".join([*dict.fromkeys((document.title, passage.title)), passage.text]))


def read_document(record: dict[str, Any]) -> Document:
    """Return the document of a JSON record."""
    headings = tuple((int(offset), str(title)) for offset, title in record.pop("headings"))
    pages = tuple(int(offset) for offset in record.pop("pages"))
    notes = tuple(str(note) for note in record.pop("notes"))
    return Document(**record, headings=headings, pages=pages, notes=notes)


def write_lines(path: Path, records: Iterable[object]) -> None:
    """Write one JSON value per line."""
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    path.write_bytes("".join(lines).encode("utf-8", "surrogatepass"))


def read_lines(path: Path) -> list[Any]:
    """Read one JSON value per line."""
    text = path.read_bytes().decode("utf-8", "surrogatepass")
    return [json.loads(line) for line in text.split("\n") if line]
