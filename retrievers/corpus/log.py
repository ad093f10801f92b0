"""Text appended to a corpus that is not on disk yet: bounded, and drafted from all the same.

Finished answers come in one by one. They wait here until there is enough for a segment on disk (a
log-structured merge tree, O'Neil et al. 1996); meanwhile small segments in memory make them
visible. These are made when somebody looks, and rebuilt geometrically, so that a token is sorted a
handful of times before it reaches the disk, however often somebody looks.
"""

from __future__ import annotations

import threading
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

# An older part is rebuilt together with newer ones while it is less than so many times as large.
FACTOR = 4
# Scopes whose segments in memory are kept; those of others are made again when asked for.
MOST_TENANTS = 16

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
    """Some documents of one scope, oldest first; segment: where it has been made."""

    documents: list[Document]
    tokens: int
    segment: Segment | None = None


@dataclass(slots=True)
class _Scope:
    """What waits in one scope: parts of decreasing size, then what came since."""

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


class AppendLog:
    """The documents that wait, by scope; any number of threads may use it.

    A batch that is being written to disk stays visible until `done` says that it is there.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._vocab_size = vocab_size
        self._depth = depth
        self._lock = threading.RLock()
        self._open: dict[str, _Scope] = {}
        self._taken: dict[str, _Scope] = {}
        self._visible: dict[str, None] = {}  # scopes with segments in memory, last seen last
        self._waiting = 0
        self._leaving = 0
        self.dropped = 0

    @property
    def waiting(self) -> int:
        """Tokens that no batch has taken yet; each document counts one more."""
        return self._waiting

    @property
    def tokens(self) -> int:
        """All that is held, batches on their way to the disk included, counted as `waiting`."""
        return self._waiting + self._leaving

    def append(self, tokens: Sequence[int] | NDArray[Any], scope: str) -> int:
        """Add a document and return what now waits; raises InputError for ids out of range."""
        inputs = token_row(tokens)
        check_ids(inputs, self._vocab_size, "the document")
        document = inputs.astype(np.int32)  # a copy: the caller may go on writing to its own
        with self._lock:
            if len(document):
                self._open.setdefault(scope, _Scope()).fresh.append(document)
                self._waiting += len(document) + 1
            return self._waiting

    def segments(self, scope: str) -> tuple[Segment, ...]:
        """Return segments that hold all documents of one scope, made where they are missing."""
        with self._lock:
            parts: list[_Part] = []
            for each in (self._taken.get(scope), self._open.get(scope)):
                if each is not None:
                    each.fold()
                    parts += each.parts
            for part in parts:
                if part.segment is None:
                    part.segment = segment_in_memory(part.documents, self._vocab_size, self._depth)
            if parts:
                self._keep(scope)
            return tuple(part.segment for part in parts if part.segment is not None)

    def take(self) -> Mapping[str, list[Document]]:
        """Take a batch: all that waits, by scope, oldest first; `done` or `give_back` must follow.

        Raises RuntimeError where the last batch is still out.
        """
        with self._lock:
            if self._taken:
                raise RuntimeError("a batch is out; expected done() or give_back() first.")
            self._taken, self._open = self._open, {}
            self._leaving, self._waiting = self._waiting, 0
            return {scope: each.documents for scope, each in self._taken.items()}

    def done(self) -> None:
        """Forget the batch: it is on disk."""
        with self._lock:
            self._taken, self._leaving = {}, 0

    def give_back(self) -> None:
        """Put the batch back in front of what came since: it could not be written."""
        with self._lock:
            for scope, newer in self._open.items():
                older = self._taken.setdefault(scope, _Scope())
                older.fold()
                newer.fold()
                older.parts += newer.parts
            self._open, self._taken = self._taken, {}
            self._waiting, self._leaving = self.tokens, 0

    def drop(self, most: int) -> int:
        """Drop documents, of the largest scope its oldest first, until at most `most` wait."""
        with self._lock:
            before = self._waiting
            while self._waiting > most and self._open:
                held = {s: sum(map(len, each.documents)) for s, each in self._open.items()}
                scope = max(held, key=lambda name: held[name])
                documents = self._open[scope].documents
                lengths = np.cumsum([len(document) + 1 for document in documents])
                first = int(np.searchsorted(lengths, self._waiting - most)) + 1
                self._waiting -= int(lengths[min(first, len(lengths)) - 1])
                self._open[scope] = _Scope(fresh=documents[first:])
                if not self._open[scope].fresh:
                    del self._open[scope]
            self.dropped += before - self._waiting
            return before - self._waiting

    def forget(self, scope: str) -> None:
        """Drop what waits in one scope."""
        with self._lock:
            gone = self._open.pop(scope, None)
            if gone is not None:
                self._waiting -= sum(len(document) + 1 for document in gone.documents)
            self._visible.pop(scope, None)

    def _keep(self, scope: str) -> None:
        """Note that a scope was looked at; release the segments of the one longest unseen."""
        self._visible.pop(scope, None)
        self._visible[scope] = None
        while len(self._visible) > MOST_TENANTS:
            unseen = next(iter(self._visible))
            del self._visible[unseen]
            for held in (self._open, self._taken):
                for part in held[unseen].parts if unseen in held else ():
                    part.segment = None
