"""Appended text of a corpus that is not on disk yet, but is drafted from.

Small segments in memory make it visible. They are built when a reader asks for them, and merged
geometrically, so that a token is sorted only a few times before it reaches the disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.indexes.segment import Segment, segment_in_memory
from ragspec.retrievers.indexes.suffix_array import check_ids, token_row

FACTOR = 4  # an older part is merged with newer ones while it is less than so many times as large
MOST_TENANTS = 16  # scopes whose segments stay in memory; others are built again when read

Document = NDArray[np.int32]


@dataclass(slots=True)
class _Part:
    """Some documents of one scope, oldest first, and their segment if it was built."""

    documents: list[Document] = field(default_factory=list)
    tokens: int = 0
    segment: Segment | None = None


class AppendBuffer:
    """The documents in memory, by scope. It is not thread-safe: the owner holds a lock.

    Attributes:
        tokens: Tokens that wait; each document counts one more.
        dropped: Tokens that were lost because they could not be written.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._vocab_size = vocab_size
        self._depth = depth
        self._scopes: dict[str, list[_Part]] = {}  # of decreasing size
        self._visible: dict[str, None] = {}  # scopes with segments, least recently read first
        self.tokens = self.dropped = 0

    def append(self, tokens: Sequence[int] | NDArray[Any], scope: str) -> None:
        """Add a document; raise InputError if it is no row of ids below the vocabulary's size."""
        row = token_row(tokens)
        check_ids(row, self._vocab_size, "the document")
        document = row.astype(np.int32)  # a copy: the caller may go on writing to its array
        if not len(document):
            return
        parts = self._scopes.setdefault(scope, [])
        if not parts or parts[-1].segment is not None:
            parts.append(_Part())
        parts[-1].documents.append(document)
        parts[-1].tokens += len(document)
        self.tokens += len(document) + 1

    def segments(self, scope: str) -> tuple[Segment, ...]:
        """Return segments that hold all documents of one scope; build the missing ones."""
        if scope not in self._scopes:
            return ()
        parts, segments = self._scopes[scope], list[Segment]()
        while len(parts) > 1 and parts[-2].tokens < FACTOR * parts[-1].tokens:
            newest, older = parts.pop(), parts.pop()
            documents = older.documents + newest.documents
            parts.append(_Part(documents, older.tokens + newest.tokens))
        for part in parts:
            if part.segment is None:
                part.segment = segment_in_memory(part.documents, self._vocab_size, self._depth)
            segments.append(part.segment)
        self._visible.pop(scope, None)
        self._visible[scope] = None
        while len(self._visible) > MOST_TENANTS:
            unseen = next(iter(self._visible))
            del self._visible[unseen]
            for part in self._scopes[unseen]:
                part.segment = None
        return tuple(segments)

    def documents(self) -> Mapping[str, list[Document]]:
        """Return all documents by scope, oldest first."""
        return {scope: _joined(parts) for scope, parts in self._scopes.items()}

    def clear(self) -> None:
        """Forget all documents: they are on disk."""
        self._scopes, self._visible, self.tokens = {}, {}, 0

    def forget(self, scope: str) -> None:
        """Drop the documents of one scope."""
        gone = self._scopes.pop(scope, [])
        self.tokens -= sum(part.tokens + len(part.documents) for part in gone)
        self._visible.pop(scope, None)

    def drop(self, most: int) -> None:
        """Drop the oldest documents of the largest scopes until at most `most` tokens wait."""
        while self.tokens > most:
            held = {name: sum(p.tokens for p in parts) for name, parts in self._scopes.items()}
            scope = max(held, key=lambda name: held[name])
            documents, before = _joined(self._scopes[scope]), self.tokens
            lengths = np.cumsum([len(document) + 1 for document in documents])
            first = int(np.searchsorted(lengths, before - most)) + 1
            self.forget(scope)
            for document in documents[first:]:
                self.append(document, scope)
            self.dropped += before - self.tokens


def _joined(parts: Sequence[_Part]) -> list[Document]:
    """Return all documents, oldest first."""
    return [document for part in parts for document in part.documents]
