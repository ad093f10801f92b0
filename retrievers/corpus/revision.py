"""Appended text of a corpus in memory, and changes on disk, each as a new generation.

Appended text is drafted from before it is on disk, by small segments in memory. They are built when
a reader asks for them, and merged as those on disk, so that a token is sorted a few times before it
gets there. On disk only new segments are written; the others are carried over by hard links, with
their hashes. Readers see the whole change or nothing of it, also after a crash (`storage.store`).
Segments are merged as in a log-structured merge tree (O'Neil et al. 1996), by a factor of 4.
"""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.corpus.catalogue import (
    KIND,
    Catalogue,
    SegmentRecord,
    SegmentSource,
    files_of,
    open_segment,
    read_catalogue,
)
from ragspec.retrievers.indexes.segment import Segment, build_segment, segment_in_memory
from ragspec.retrievers.indexes.suffix_array import TokenRow, check_ids, token_row
from ragspec.storage.manifest import Contents, FileRecord
from ragspec.storage.store import OpenStore, carry, open_store, publish

FACTOR = 4  # appending merges a segment that is less than so many times as large as the next newer
LARGEST = 1 << 26
MERGED = 1 << 20  # largest segment that appending makes, in tokens: about a second
WAIT_SECONDS = 30.0  # for another writer
MOST_TENANTS = 16  # scopes whose segments stay in memory; others are built again when read

Document = NDArray[Any]


class AppendBuffer:
    """The documents in memory, by scope. It is not thread-safe: the owner holds a lock.

    Attributes:
        documents: All documents by scope, oldest first.
        tokens: Tokens that wait; each document counts one more.
        dropped: Tokens that were lost because they could not be written.
    """

    def __init__(self, vocab_size: int, depth: int) -> None:
        self._vocab_size, self._depth = vocab_size, depth
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


class Revision:
    """A change in progress, made on the catalogue and in the new folder.

    Segments that the change leaves alone are carried over at the end.

    Args:
        store: The generation that it starts from, None for a first one.
    """

    def __init__(self, folder: Path, store: OpenStore | None, catalogue: Catalogue) -> None:
        self.folder, self.catalogue = folder, catalogue
        # By name of a segment of an older generation, that generation.
        self._stores = {} if store is None else {r.name: store for r in catalogue.segments}

    def write(self, documents: Iterable[Document], scope: str, source: SegmentSource) -> None:
        """Write one segment, the newest of the catalogue, if there is any text."""
        name = f"seg-{self.catalogue.serial:06d}"
        folder, catalogue = self.folder / name, self.catalogue
        folder.mkdir()
        texts = (document for document in documents if len(document))
        segment = build_segment(folder, texts, catalogue.vocab_size, depth=catalogue.depth)
        if not segment.document_count:
            shutil.rmtree(folder)
            return
        new = SegmentRecord(name, scope, source, len(segment), segment.document_count)
        segments = (*catalogue.segments, new)
        self.catalogue = replace(catalogue, serial=catalogue.serial + 1, segments=segments)

    def drop(self, records: Sequence[SegmentRecord]) -> None:
        """Take segments out."""
        left = tuple(each for each in self.catalogue.segments if each not in records)
        self.catalogue = replace(self.catalogue, segments=left)
        for record in records:
            shutil.rmtree(self.folder / record.name, ignore_errors=True)

    def documents(self, record: SegmentRecord) -> list[Document]:
        """Return the texts of a segment, checked against their hashes, oldest first."""
        catalogue, folder = self.catalogue, self.folder / record.name
        if store := self._stores.get(record.name):
            return list(open_segment(store, catalogue, record, "full").documents())
        return list(Segment.open(folder, catalogue.vocab_size, catalogue.depth).documents())

    def append(self, documents: Sequence[Document], scope: str, largest: int = MERGED) -> None:
        """Add appended text of a scope, merged with the newest segments if that pays.

        Afterwards every segment is at least FACTOR times as large as the next newer one, or about
        as large as a segment may get.
        """
        run: list[SegmentRecord] = []
        size = sum(map(len, documents))
        mine = (scope, SegmentSource.APPENDED)
        records = [each for each in self.catalogue.segments if (each.scope, each.source) == mine]
        for record in reversed(records):
            if record.tokens >= FACTOR * size or record.tokens + size > largest:
                break
            run.insert(0, record)
            size += record.tokens
        texts = [document for record in run for document in self.documents(record)]
        self.write([*texts, *documents], scope, SegmentSource.APPENDED)
        self.drop(run)

    def evict(self, max_tokens: int) -> None:
        """Drop the oldest appended segments until they have at most `max_tokens`."""
        appended = [r for r in self.catalogue.segments if r.source is SegmentSource.APPENDED]
        while sum(record.tokens for record in appended) > max_tokens:
            self.drop([appended.pop(0)])

    def contents(self) -> Contents:
        """Carry over the unchanged segments and return the contents of the generation."""
        carried: dict[str, FileRecord] = {}
        for record in self.catalogue.segments:
            if store := self._stores.get(record.name):
                carried |= carry(store, dict(files_of(store, record)), self.folder)
        return Contents(self.catalogue.parameters, self.catalogue.fingerprints, carried)


def revise(
    root: Path, change: Callable[[Revision], None], new: Catalogue | None = None
) -> OpenStore:
    """Change the current generation into a new one, with the writers' lock held.

    Args:
        new: The catalogue of a new corpus, which replaces an older one; None changes that one.

    Raises:
        StoreError: The store cannot be read or written, or the folder holds another kind of store.
            Errors of `change` pass through.
    """

    def write(folder: Path) -> Contents:
        if new is not None:
            revision = Revision(folder, None, new)
        else:
            store = open_store(root, KIND, verify="size")
            revision = Revision(folder, store, read_catalogue(store))
        change(revision)
        return revision.contents()

    return publish(root, KIND, write, wait=WAIT_SECONDS)
