"""A segment: texts that never change, on disk, with an index of every phrase in them.

    folder/
      tokens.bin     u16 or u32 [T]   a separator, then every document and a separator behind it
      suffixes.bin   i32 [S]          positions of all tokens, in the order of the text up to them
      buckets.bin    i64 [V + 1]      where the positions of each token start
      starts.bin     i64 [D + 1]      where each document starts in the tokens; the last is T
      segment.json                    sizes and parameters

The files are mapped into memory, and look-ups touch few pages. Small files are read instead, since
each map holds a file open and there may be many small segments. The separator is the id after the
vocabulary, so no context of a model matches across documents, and no continuation passes the end of
one. Longest matches, exact counts and drafts of bounded depth replace the suffix trees of
SuffixDecoding (arXiv 2411.04975) and the whole-file reads of REST (arXiv 2311.08252), at 6 to 8
bytes a token. The store around the segment checks hashes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.indexes.continuations import Arrays, Draft, DraftOptions, Match
from ragspec.retrievers.indexes.suffix_array import check_ids, count_first_tokens, sort_suffixes
from ragspec.storage.filesystem import read_file, reserve, unreadable

FORMAT = 1
SIZES = "segment.json"
TOKENS, SUFFIXES, BUCKETS, STARTS = "tokens.bin", "suffixes.bin", "buckets.bin", "starts.bin"
FILES = (TOKENS, SUFFIXES, BUCKETS, STARTS, SIZES)
DEPTH = 32
_LONGEST = 2**31 - 1
_WRITE = 1 << 18
_SMALL = 1 << 20  # bytes of a file that is read, not mapped
_DEFAULTS = DraftOptions()


@dataclass(frozen=True, slots=True)
class SegmentSizes:
    """The contents of `segment.json`.

    Attributes:
        positions: Ids in the token file, with separators.
        suffixes: Tokens without separators.
    """

    positions: int
    suffixes: int
    documents: int
    vocab_size: int
    depth: int
    format: int = FORMAT

    @property
    def dtype(self) -> str:
        """The dtype of the token file, little-endian; the separator must fit too."""
        return "<u2" if self.vocab_size < 2**16 else "<u4"


def build_segment(
    folder: Path,
    documents: Iterable[Sequence[int] | NDArray[Any]],
    vocab_size: int,
    *,
    depth: int = DEPTH,
) -> SegmentSizes:
    """Write the files of a segment into an existing folder.

    Args:
        documents: Token ids in [0, vocab_size) each, may be a stream; empty documents count.
        depth: Tokens in which positions are compared; no match is longer.

    Raises:
        InputError: An id is outside the vocabulary, or there are more than 2^31 - 1 positions.
        StoreError: The disk is full.
    """
    if not 1 <= vocab_size < _LONGEST or depth < 2:
        raise InputError(f"got vocabulary {vocab_size}, depth {depth}; expected 1 and 2 or more.")
    folder = Path(folder)
    dtype = SegmentSizes(0, 0, 0, vocab_size, depth).dtype
    starts = _write_tokens(folder / TOKENS, documents, vocab_size, np.dtype(dtype))
    tokens = np.asarray(np.memmap(folder / TOKENS, dtype=dtype, mode="r"))
    buckets = count_first_tokens(tokens, vocab_size)
    total = int(buckets[-1])
    reserve(folder / SUFFIXES, 4 * total)
    if total:
        suffixes = np.memmap(folder / SUFFIXES, dtype="<i4", mode="r+", shape=(total,))
        sort_suffixes(tokens, vocab_size, depth=depth, buckets=buckets, out=suffixes)
        suffixes.flush()
    buckets.astype("<i8").tofile(folder / BUCKETS)
    starts.astype("<i8").tofile(folder / STARTS)
    sizes = SegmentSizes(len(tokens), total, len(starts) - 1, vocab_size, depth)
    (folder / SIZES).write_text(json.dumps(asdict(sizes), indent=1, sort_keys=True))
    return sizes


def _write_tokens(
    path: Path,
    documents: Iterable[Sequence[int] | NDArray[Any]],
    separator: int,
    dtype: np.dtype[Any],
) -> NDArray[np.int64]:
    """Write the token file in chunks; return where documents start, and the end."""
    border = np.array([separator], dtype=dtype)
    chunks, waiting, at = [border], 1, 1
    starts = [1]
    with path.open("wb") as stream:
        for number, document in enumerate(documents):
            ids = np.asarray(document)
            check_ids(ids, separator, f"document {number}")
            chunks += [ids.astype(dtype), border]
            waiting += len(ids) + 1
            at += len(ids) + 1
            starts.append(at)
            if at > _LONGEST:
                raise InputError(f"got more than {_LONGEST} tokens; make several segments.")
            if waiting >= _WRITE:
                stream.write(np.concatenate(chunks).tobytes())
                chunks, waiting = [], 0
        stream.write(np.concatenate(chunks or [border[:0]]).tobytes())
    return np.array(starts, dtype=np.int64)


class Segment:
    """An open segment; any number of threads and processes may read it.

    Attributes:
        tokens, suffixes, starts: See `Arrays`.
        depth: Tokens to which the suffixes are sorted.
    """

    def __init__(self, sizes: SegmentSizes, arrays: Arrays) -> None:
        self.sizes = sizes
        self.vocab_size = sizes.vocab_size
        self.depth = sizes.depth
        self.tokens = arrays.tokens
        self.suffixes = arrays.suffixes
        self.starts = arrays.starts
        self._arrays = arrays

    def __len__(self) -> int:
        """Return the number of tokens without separators."""
        return self.sizes.suffixes

    @property
    def document_count(self) -> int:
        """The number of documents, with empty ones."""
        return self.sizes.documents

    @classmethod
    def open(cls, folder: Path) -> Segment:
        """Map the files of a segment; only their sizes are checked.

        Raises:
            StoreError: A file is missing or has another size.
        """
        folder = Path(folder)
        sizes = _read_sizes(folder / SIZES)
        arrays = Arrays(
            _map(folder / TOKENS, sizes.dtype, sizes.positions),
            _map(folder / SUFFIXES, "<i4", sizes.suffixes),
            _map(folder / BUCKETS, "<i8", sizes.vocab_size + 1),
            _map(folder / STARTS, "<i8", sizes.documents + 1),
        )
        return cls(sizes, arrays)

    def documents(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens of every document in order, as views of the mapped file."""
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            yield self.tokens[start : end - 1]

    def longest_match(self, context: Sequence[int], max_match: int = 16) -> Match:
        """Return the longest suffix of the context, up to `max_match` tokens, that occurs here.

        The interval [low, high) of `suffixes` holds all its occurrences: the count is exact.

        Raises:
            InputError: `max_match` exceeds the depth of the segment.
        """
        if not 1 <= max_match <= self.depth:
            raise InputError(f"max_match is {max_match}; expected 1 to {self.depth}.")
        from ragspec.retrievers.indexes.lookup import longest  # not above: numba loads slowly

        text, tail = (self.tokens, self.suffixes), self._tail(context, max_match)
        return Match(*longest(text, self._arrays.buckets, tail, max_match))

    def draft(
        self,
        context: Sequence[int],
        budget: int,
        *,
        max_depth: int | None = None,
        options: DraftOptions | None = None,
    ) -> Draft:
        """Return the continuations of the context as a tree of at most `budget` nodes.

        Args:
            context: Token ids, the newest last.
            max_depth: Most levels of the tree; those of the options by default and at most.

        Raises:
            InputError: The longest match exceeds the depth of the segment: counts would be wrong.
        """
        from ragspec.retrievers.indexes.lookup import draft  # not above: numba loads slowly

        options = options or _DEFAULTS
        if options.max_match > self.depth:
            raise InputError(
                f"max_match is {options.max_match}, but this segment is sorted to {self.depth} "
                "tokens; ask for less or build it deeper."
            )
        depth = options.max_depth if max_depth is None else min(max_depth, options.max_depth)
        tail = self._tail(context, options.max_match)
        caps = (options.max_match, options.rows, options.contexts)
        return Draft(
            *draft(*self._arrays, tail, budget, depth, caps, options.lengths, options.chances)
        )

    def warm_up(self) -> None:
        """Load the look-ups and use them once; the first time ever compiles them."""
        self.draft([0], 4)

    def _tail(self, context: Sequence[int], length: int) -> NDArray[np.int64]:
        """Return the last tokens of the context that follow the last id outside the vocabulary."""
        tail = context[-length:]
        if tail and (min(tail) < 0 or max(tail) >= self.vocab_size):
            foreign = [at for at, token in enumerate(tail) if not 0 <= token < self.vocab_size]
            tail = tail[foreign[-1] + 1 :]
        return np.array(tail, dtype=np.int64)


def _read_sizes(path: Path) -> SegmentSizes:
    """Read `segment.json`; raise StoreError if it is damaged or of another format."""
    try:
        sizes = SegmentSizes(**json.loads(read_file(path)))
        numbers = asdict(sizes)
        if any(type(n) is not int or n < 0 for n in numbers.values()):
            raise ValueError(f"numbers {numbers}")
    except (ValueError, TypeError) as error:
        raise StoreError(
            f"{path} describes no segment ({error}); build the store again."
        ) from error
    if sizes.format != FORMAT:
        raise StoreError(
            f"{path} has format {sizes.format}, this version reads {FORMAT}; build it again."
        )
    return sizes


def _map(path: Path, dtype: str, length: int) -> NDArray[Any]:
    """Return the array in a file, read-only; raise StoreError if it has another length."""
    expected = length * np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size == expected and size > _SMALL:
            return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
        if size == expected:
            array = np.fromfile(path, dtype=dtype)
            array.flags.writeable = False  # as if mapped: one kind of array to compile for
            return array
    except OSError as error:
        raise unreadable(path, error) from error
    raise StoreError(f"{path} has {size} bytes, expected {expected}; build the store again.")
