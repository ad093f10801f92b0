"""Text on disk to draft from, which grows while in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.retrievers.corpus.index import CorpusIndex as CorpusIndex
    from ragspec.retrievers.corpus.rest import RestDrafter as RestDrafter

_WHERE = {
    "CorpusIndex": "ragspec.retrievers.corpus.index",
    "RestDrafter": "ragspec.retrievers.corpus.rest",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
