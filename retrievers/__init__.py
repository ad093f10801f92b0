"""Whatever proposes from, or looks things up in, text that already exists.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.retrievers.context import ContextDrafter as ContextDrafter
    from ragspec.retrievers.dense import DenseIndex as DenseIndex
    from ragspec.retrievers.dense import Embedder as Embedder
    from ragspec.retrievers.dense import load_embedder as load_embedder
    from ragspec.retrievers.documents import Collection as Collection
    from ragspec.retrievers.documents import Document as Document
    from ragspec.retrievers.documents import load_document as load_document
    from ragspec.retrievers.documents import load_documents as load_documents
    from ragspec.retrievers.index import PassageIndex as PassageIndex
    from ragspec.retrievers.passages import Passage as Passage
    from ragspec.retrievers.passages import split_document as split_document
    from ragspec.retrievers.search import Hit as Hit
    from ragspec.retrievers.search import Retriever as Retriever
    from ragspec.retrievers.search import SearchMode as SearchMode
    from ragspec.retrievers.search import as_retriever as as_retriever
    from ragspec.retrievers.sparse import SparseIndex as SparseIndex

_WHERE = {
    "Collection": "documents",
    "ContextDrafter": "context",
    "DenseIndex": "dense",
    "Document": "documents",
    "Embedder": "dense",
    "Hit": "search",
    "Passage": "passages",
    "PassageIndex": "index",
    "Retriever": "search",
    "SearchMode": "search",
    "SparseIndex": "sparse",
    "as_retriever": "search",
    "load_document": "documents",
    "load_documents": "documents",
    "load_embedder": "dense",
    "split_document": "passages",
}

__all__ = [
    "Collection",
    "ContextDrafter",
    "DenseIndex",
    "Document",
    "Embedder",
    "Hit",
    "Passage",
    "PassageIndex",
    "Retriever",
    "SearchMode",
    "SparseIndex",
    "as_retriever",
    "load_document",
    "load_documents",
    "load_embedder",
    "split_document",
]

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names

    def __getattr__(name: str) -> Any:
        """Import a public name on first use."""
        from importlib import import_module

        if name not in _WHERE:
            raise AttributeError(f"module 'ragspec.retrievers' has no attribute {name!r}")
        value = getattr(import_module(f"ragspec.retrievers.{_WHERE[name]}"), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
