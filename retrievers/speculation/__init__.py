"""Text written on guesses of what a search would find, and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.speculation.loop import Searcher as Searcher
    from ragspec.retrievers.speculation.loop import SpeculativeRetrieval as SpeculativeRetrieval
    from ragspec.retrievers.speculation.loop import Writer as Writer
    from ragspec.retrievers.speculation.schedule import Schedule as Schedule

_WHERE = {
    "Schedule": "ragspec.retrievers.speculation.schedule",
    "Searcher": "ragspec.retrievers.speculation.loop",
    "SpeculativeRetrieval": "ragspec.retrievers.speculation.loop",
    "Writer": "ragspec.retrievers.speculation.loop",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
