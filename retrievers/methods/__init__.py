"""The drafting methods over text that exists, one file for each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
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

_WHERE = {
    "AutoDrafter": "ragspec.retrievers.methods.auto",
    "Cascade": "ragspec.retrievers.methods.cascade",
    "ContextDrafter": "ragspec.retrievers.methods.context",
    "HierarchyDrafter": "ragspec.retrievers.methods.hierarchy_drafting",
    "LookupDrafter": "ragspec.retrievers.methods.prompt_lookup",
    "MatchDrafter": "ragspec.retrievers.methods.sam_decoding",
    "NGramDrafter": "ragspec.retrievers.methods.ngrams",
    "NGramPool": "ragspec.retrievers.methods.ngrams",
    "NeighbourDrafter": "ragspec.retrievers.methods.token_recycling",
    "Rasd": "ragspec.retrievers.methods.rasd",
    "Select": "ragspec.retrievers.methods.sam_decoding",
    "SuffixDrafter": "ragspec.retrievers.methods.suffix_decoding",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
