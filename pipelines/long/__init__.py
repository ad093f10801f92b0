"""Questions over one long document that is read once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.long.chunks import ChunkSearch as ChunkSearch
    from ragspec.pipelines.long.document import LongDocument as LongDocument

_WHERE = {
    "ChunkSearch": "ragspec.pipelines.long.chunks",
    "LongDocument": "ragspec.pipelines.long.document",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
