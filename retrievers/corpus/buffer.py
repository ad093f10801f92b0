"""Appended text of a corpus that is not on disk yet, but is drafted from.

Small segments in memory make it visible. They are built when a reader asks for them, and merged
geometrically as those on disk, so that a token is sorted a few times before it gets there.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.corpus.revision import FACTOR
from ragspec.retrievers.indexes.segment import Segment, segment_in_memory
from ragspec.retrievers.indexes.suffix_array import TokenRow, check_ids, token_row

MOST_TENANTS = 16  # scopes whose segments stay in memory; others are built again when read

Document = NDArray[np.int32]


class AppendBuffer:
    """The documents in memory, by scope. It is not thread-safe: the owner holds a lock.

    Attributes:
        documents: All documents by scope, oldest first.
        tokens: Tokens that wait; each document counts one more.
        dropped: Tokens that were lost because they could not be written.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._vocab_size = vocab_size
        self._depth = depth
        self.documents: dict[str, list[Document]] = {}
        # Segments of a scope have its oldest documents; the least recently read scope comes first.
        self._segments: dict[str, list[Segment]] = {}
        self.tokens = self.dropped = 0

    def append(self, tokens: Sequence[int] | TokenRow, scope: str) -> None:
        """Add a document; raise InputError if it is no row of ids below the vocabulary's size."""
        row = token_row(tokens)
        check_ids(row, self._vocab_size, "the document")
        document = row.astype(np.int32)  # a copy: the caller may go on writing to its array
        if len(document):
            self.documents.setdefault(scope, []).append(document)
            self.tokens += len(document) + 1

    def segments(self, scope: str) -> tuple[Segment, ...]:
        """Return segments that hold all documents of one scope; build the missing ones."""
        if scope not in self.documents:
            return ()
        documents, segments = self.documents[scope], self._segments.pop(scope, [])
        first = sum(segment.document_count for segment in segments)
        size = sum(map(len, documents[first:]))
        while segments and len(segments[-1]) < FACTOR * size:
            older = segments.pop()
            first -= older.document_count
            size += len(older)
        if size:
            segments.append(segment_in_memory(documents[first:], self._vocab_size, self._depth))
        self._segments[scope] = segments
        if len(self._segments) > MOST_TENANTS:
            del self._segments[next(iter(self._segments))]
        return tuple(segments)

    def clear(self) -> None:
        """Forget all documents: they are on disk."""
        self.documents, self._segments, self.tokens = {}, {}, 0

    def forget(self, scope: str) -> None:
        """Drop the documents of one scope."""
        self.tokens -= sum(len(document) + 1 for document in self.documents.pop(scope, ()))
        self._segments.pop(scope, None)

    def drop(self, most: int) -> None:
        """Drop the oldest documents of the largest scopes until at most `most` tokens wait."""
        sizes = {scope: sum(map(len, rows)) for scope, rows in self.documents.items()}
        while self.tokens > most:
            scope = max(sizes, key=lambda name: sizes[name])
            gone = len(self.documents[scope].pop(0))
            sizes[scope] -= gone
            self.tokens -= gone + 1
            self.dropped += gone + 1
            self._segments.pop(scope, None)
            if not self.documents[scope]:
                del self.documents[scope], sizes[scope]
