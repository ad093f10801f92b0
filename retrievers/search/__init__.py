"""From files to passages, and from a question to the passages that may answer it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.search.dense import DenseIndex as DenseIndex
    from ragspec.retrievers.search.dense import Embedder as Embedder
    from ragspec.retrievers.search.dense import load_embedder as load_embedder
    from ragspec.retrievers.search.documents import Collection as Collection
    from ragspec.retrievers.search.documents import Document as Document
    from ragspec.retrievers.search.documents import load_document as load_document
    from ragspec.retrievers.search.documents import load_documents as load_documents
    from ragspec.retrievers.search.fusion import Hit as Hit
    from ragspec.retrievers.search.fusion import Retriever as Retriever
    from ragspec.retrievers.search.fusion import SearchMode as SearchMode
    from ragspec.retrievers.search.fusion import as_retriever as as_retriever
    from ragspec.retrievers.search.passage_index import PassageIndex as PassageIndex
    from ragspec.retrievers.search.passages import Passage as Passage
    from ragspec.retrievers.search.passages import split_document as split_document
    from ragspec.retrievers.search.sparse import SparseIndex as SparseIndex

_WHERE = {
    "Collection": "ragspec.retrievers.search.documents",
    "DenseIndex": "ragspec.retrievers.search.dense",
    "Document": "ragspec.retrievers.search.documents",
    "Embedder": "ragspec.retrievers.search.dense",
    "Hit": "ragspec.retrievers.search.fusion",
    "Passage": "ragspec.retrievers.search.passages",
    "PassageIndex": "ragspec.retrievers.search.passage_index",
    "Retriever": "ragspec.retrievers.search.fusion",
    "SearchMode": "ragspec.retrievers.search.fusion",
    "SparseIndex": "ragspec.retrievers.search.sparse",
    "as_retriever": "ragspec.retrievers.search.fusion",
    "load_document": "ragspec.retrievers.search.documents",
    "load_documents": "ragspec.retrievers.search.documents",
    "load_embedder": "ragspec.retrievers.search.dense",
    "split_document": "ragspec.retrievers.search.passages",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
