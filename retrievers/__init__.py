"""Whatever proposes from, or looks things up in, text that already exists.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.corpus.index import CorpusIndex as CorpusIndex
    from ragspec.retrievers.corpus.rest import RestDrafter as RestDrafter
    from ragspec.retrievers.indexes.context_index import ContextIndex as ContextIndex
    from ragspec.retrievers.knn.datastore import Datastore as Datastore
    from ragspec.retrievers.methods.auto import AutoDrafter as AutoDrafter
    from ragspec.retrievers.methods.cascade import Cascade as Cascade
    from ragspec.retrievers.methods.context import ContextDrafter as ContextDrafter
    from ragspec.retrievers.methods.hierarchy_drafting import HierarchyDrafter as HierarchyDrafter
    from ragspec.retrievers.methods.ngrams import NGramDrafter as NGramDrafter
    from ragspec.retrievers.methods.ngrams import NGramPool as NGramPool
    from ragspec.retrievers.methods.prompt_lookup import LookupDrafter as LookupDrafter
    from ragspec.retrievers.methods.rasd import Rasd as Rasd
    from ragspec.retrievers.methods.sam_decoding import MatchDrafter as MatchDrafter
    from ragspec.retrievers.methods.sam_decoding import Select as Select
    from ragspec.retrievers.methods.suffix_decoding import SuffixDrafter as SuffixDrafter
    from ragspec.retrievers.methods.token_recycling import NeighbourDrafter as NeighbourDrafter
    from ragspec.retrievers.neighbours.table import NeighbourTable as NeighbourTable
    from ragspec.retrievers.rapid.drafter import Rapid as Rapid
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
    "AutoDrafter": "ragspec.retrievers.methods.auto",
    "Cascade": "ragspec.retrievers.methods.cascade",
    "Collection": "ragspec.retrievers.search.documents",
    "ContextDrafter": "ragspec.retrievers.methods.context",
    "ContextIndex": "ragspec.retrievers.indexes.context_index",
    "CorpusIndex": "ragspec.retrievers.corpus.index",
    "Datastore": "ragspec.retrievers.knn.datastore",
    "DenseIndex": "ragspec.retrievers.search.dense",
    "Document": "ragspec.retrievers.search.documents",
    "Embedder": "ragspec.retrievers.search.dense",
    "HierarchyDrafter": "ragspec.retrievers.methods.hierarchy_drafting",
    "Hit": "ragspec.retrievers.search.fusion",
    "LookupDrafter": "ragspec.retrievers.methods.prompt_lookup",
    "MatchDrafter": "ragspec.retrievers.methods.sam_decoding",
    "NGramDrafter": "ragspec.retrievers.methods.ngrams",
    "NGramPool": "ragspec.retrievers.methods.ngrams",
    "NeighbourDrafter": "ragspec.retrievers.methods.token_recycling",
    "NeighbourTable": "ragspec.retrievers.neighbours.table",
    "Passage": "ragspec.retrievers.search.passages",
    "PassageIndex": "ragspec.retrievers.search.passage_index",
    "Rapid": "ragspec.retrievers.rapid.drafter",
    "Rasd": "ragspec.retrievers.methods.rasd",
    "RestDrafter": "ragspec.retrievers.corpus.rest",
    "Retriever": "ragspec.retrievers.search.fusion",
    "SearchMode": "ragspec.retrievers.search.fusion",
    "Select": "ragspec.retrievers.methods.sam_decoding",
    "SparseIndex": "ragspec.retrievers.search.sparse",
    "SuffixDrafter": "ragspec.retrievers.methods.suffix_decoding",
    "as_retriever": "ragspec.retrievers.search.fusion",
    "load_document": "ragspec.retrievers.search.documents",
    "load_documents": "ragspec.retrievers.search.documents",
    "load_embedder": "ragspec.retrievers.search.dense",
    "split_document": "ragspec.retrievers.search.passages",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
