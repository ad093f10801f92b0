"""Text appended to a corpus that is not on disk yet, and drafted from all the same.

Small segments in memory make it visible. These are made when a reader looks, and rebuilt
geometrically, so that a token is sorted a handful of times before it reaches the disk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.indexes.continuations import Arrays
from ragspec.retrievers.indexes.segment import Segment, SegmentSizes
from ragspec.retrievers.indexes.suffix_array import (
    check_ids,
    count_first_tokens,
    sort_suffixes,
    token_row,
)

FACTOR = 4  # an older part is rebuilt with newer ones while it is less than so many times as large
MOST_TENANTS = 16  # whose segments stay in memory; others' are made again when a reader looks

Document = NDArray[np.int32]


def segment_in_memory(documents: Sequence[NDArray[Any]], vocab_size: int, depth: int) -> Segment:
    """Return a segment like those that `build_segment` writes, on no disk."""
    sizes = SegmentSizes(0, 0, 0, vocab_size, depth)
    border = np.array([vocab_size], dtype=sizes.dtype)
    chunks = [border]
    for document in documents:
        chunks += [document.astype(sizes.dtype), border]
    tokens = np.concatenate(chunks)
    starts = np.cumsum([1, *(len(document) + 1 for document in documents)], dtype=np.int64)
    buckets = count_first_tokens(tokens, vocab_size)
    suffixes = sort_suffixes(tokens, vocab_size, depth=depth, buckets=buckets)
    sizes = SegmentSizes(len(tokens), len(suffixes), len(documents), vocab_size, depth)
    for array in (tokens, suffixes, buckets, starts):
        array.flags.writeable = False  # as if mapped from a file: one kind of array to compile for
    return Segment(sizes, Arrays(tokens, suffixes, buckets, starts))


@dataclass(slots=True)
class _Part:
    """Some documents of one scope, oldest first; segment: where it was made."""

    documents: list[Document]
    tokens: int
    segment: Segment | None = None


@dataclass(slots=True)
class _Scope:
    """The text of one scope: parts of decreasing size, then what came since."""

    parts: list[_Part] = field(default_factory=list)
    fresh: list[Document] = field(default_factory=list)

    @property
    def documents(self) -> list[Document]:
        """All documents, oldest first."""
        return [*(document for part in self.parts for document in part.documents), *self.fresh]

    def fold(self) -> None:
        """Make a part of what came, together with the newest parts where that pays."""
        if not self.fresh:
            return
        documents, self.fresh = self.fresh, []
        tokens = sum(map(len, documents))
        while self.parts and self.parts[-1].tokens < FACTOR * tokens:
            part = self.parts.pop()
            documents = part.documents + documents
            tokens += part.tokens
        self.parts.append(_Part(documents, tokens))


class AppendBuffer:
    """The documents in memory, by scope; its owner takes care of threads.

    Attributes:
        tokens: Tokens that wait; each document counts one more.
        dropped: Tokens that were lost, since they could not be written.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._vocab_size = vocab_size
        self._depth = depth
        self._scopes: dict[str, _Scope] = {}
        self._visible: dict[str, None] = {}  # scopes with segments, the last seen last
        self.tokens = self.dropped = 0

    def append(self, tokens: Sequence[int] | NDArray[Any], scope: str) -> None:
        """Add a document; raise InputError for ids out of range."""
        row = token_row(tokens)
        check_ids(row, self._vocab_size, "the document")
        document = row.astype(np.int32)  # a copy: the caller may go on writing to its array
        if len(document):
            self._scopes.setdefault(scope, _Scope()).fresh.append(document)
            self.tokens += len(document) + 1

    def segments(self, scope: str) -> tuple[Segment, ...]:
        """Return segments that hold all documents of one scope, made where they are missing."""
        if scope not in self._scopes:
            return ()
        self._scopes[scope].fold()
        segments = []
        for part in self._scopes[scope].parts:
            if part.segment is None:
                part.segment = segment_in_memory(part.documents, self._vocab_size, self._depth)
            segments.append(part.segment)
        self._visible.pop(scope, None)
        self._visible[scope] = None
        while len(self._visible) > MOST_TENANTS:
            unseen = next(iter(self._visible))
            del self._visible[unseen]
            for part in self._scopes[unseen].parts:
                part.segment = None
        return tuple(segments)

    def documents(self) -> Mapping[str, list[Document]]:
        """Return all documents by scope, oldest first."""
        return {scope: each.documents for scope, each in self._scopes.items()}

    def clear(self) -> None:
        """Forget all documents: they are on disk."""
        self._scopes, self._visible, self.tokens = {}, {}, 0

    def forget(self, scope: str) -> None:
        """Drop the documents of one scope."""
        gone = self._scopes.pop(scope, _Scope()).documents
        self.tokens -= sum(len(document) + 1 for document in gone)
        self._visible.pop(scope, None)

    def drop(self, most: int) -> None:
        """Drop the oldest documents of the largest scopes until at most `most` tokens wait."""
        while self.tokens > most:
            held = {s: sum(map(len, each.documents)) for s, each in self._scopes.items()}
            scope = max(held, key=lambda name: held[name])
            documents, before = self._scopes[scope].documents, self.tokens
            lengths = np.cumsum([len(document) + 1 for document in documents])
            first = int(np.searchsorted(lengths, before - most)) + 1
            self.forget(scope)
            for document in documents[first:]:
                self.append(document, scope)
            self.dropped += before - self.tokens
