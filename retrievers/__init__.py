"""Whatever proposes from, or looks things up in, text that already exists.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ragspec.retrievers.auto import AutoDrafter as AutoDrafter
    from ragspec.retrievers.cascade import Cascade as Cascade
    from ragspec.retrievers.context import ContextDrafter as ContextDrafter
    from ragspec.retrievers.context_index import ContextIndex as ContextIndex
    from ragspec.retrievers.corpus import CorpusIndex as CorpusIndex
    from ragspec.retrievers.dense import DenseIndex as DenseIndex
    from ragspec.retrievers.dense import Embedder as Embedder
    from ragspec.retrievers.dense import load_embedder as load_embedder
    from ragspec.retrievers.documents import Collection as Collection
    from ragspec.retrievers.documents import Document as Document
    from ragspec.retrievers.documents import load_document as load_document
    from ragspec.retrievers.documents import load_documents as load_documents
    from ragspec.retrievers.hierarchy import HierarchyDrafter as HierarchyDrafter
    from ragspec.retrievers.index import PassageIndex as PassageIndex
    from ragspec.retrievers.lookup import LookupDrafter as LookupDrafter
    from ragspec.retrievers.neighbours import NeighbourTable as NeighbourTable
    from ragspec.retrievers.neighbours_device import DeviceNeighbourTable as DeviceNeighbourTable
    from ragspec.retrievers.ngrams import NGramDrafter as NGramDrafter
    from ragspec.retrievers.ngrams import NGramPool as NGramPool
    from ragspec.retrievers.passages import Passage as Passage
    from ragspec.retrievers.passages import split_document as split_document
    from ragspec.retrievers.rasd import Rasd as Rasd
    from ragspec.retrievers.recycling import NeighbourDrafter as NeighbourDrafter
    from ragspec.retrievers.rest import RestDrafter as RestDrafter
    from ragspec.retrievers.search import Hit as Hit
    from ragspec.retrievers.search import Retriever as Retriever
    from ragspec.retrievers.search import SearchMode as SearchMode
    from ragspec.retrievers.search import as_retriever as as_retriever
    from ragspec.retrievers.select import MatchDrafter as MatchDrafter
    from ragspec.retrievers.select import Select as Select
    from ragspec.retrievers.sparse import SparseIndex as SparseIndex
    from ragspec.retrievers.suffix import SuffixDrafter as SuffixDrafter

_WHERE = {
    "Cascade": "cascade",
    "Collection": "documents",
    "ContextDrafter": "context",
    "ContextIndex": "context_index",
    "CorpusIndex": "corpus",
    "DenseIndex": "dense",
    "DeviceNeighbourTable": "neighbours_device",
    "Document": "documents",
    "Embedder": "dense",
    "HierarchyDrafter": "hierarchy",
    "Hit": "search",
    "LookupDrafter": "lookup",
    "MatchDrafter": "select",
    "NGramDrafter": "ngrams",
    "NGramPool": "ngrams",
    "NeighbourDrafter": "recycling",
    "NeighbourTable": "neighbours",
    "Passage": "passages",
    "PassageIndex": "index",
    "Rasd": "rasd",
    "RestDrafter": "rest",
    "Retriever": "search",
    "SearchMode": "search",
    "Select": "select",
    "SparseIndex": "sparse",
    "SuffixDrafter": "suffix",
    "as_retriever": "search",
    "AutoDrafter": "auto",
    "load_document": "documents",
    "load_documents": "documents",
    "load_embedder": "dense",
    "split_document": "passages",
}

__all__ = [
    "AutoDrafter",
    "Cascade",
    "Collection",
    "ContextDrafter",
    "ContextIndex",
    "CorpusIndex",
    "DenseIndex",
    "DeviceNeighbourTable",
    "Document",
    "Embedder",
    "HierarchyDrafter",
    "Hit",
    "LookupDrafter",
    "MatchDrafter",
    "NGramDrafter",
    "NGramPool",
    "NeighbourDrafter",
    "NeighbourTable",
    "Passage",
    "PassageIndex",
    "Rasd",
    "RestDrafter",
    "Retriever",
    "SearchMode",
    "Select",
    "SparseIndex",
    "SuffixDrafter",
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
