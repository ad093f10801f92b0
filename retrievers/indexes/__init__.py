"""Where a phrase stood before, found in microseconds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.indexes.context_index import ContextIndex as ContextIndex
    from ragspec.retrievers.indexes.segment import Segment as Segment
    from ragspec.retrievers.indexes.segment import build_segment as build_segment
    from ragspec.retrievers.indexes.suffix_automaton import SuffixAutomaton as SuffixAutomaton

_WHERE = {
    "ContextIndex": "ragspec.retrievers.indexes.context_index",
    "Segment": "ragspec.retrievers.indexes.segment",
    "SuffixAutomaton": "ragspec.retrievers.indexes.suffix_automaton",
    "build_segment": "ragspec.retrievers.indexes.segment",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
