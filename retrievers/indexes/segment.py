"""A segment: texts that never change, with an index of every phrase in them, on disk or in memory.

    folder/
      tokens.bin     u16 or u32 [T]   a separator, then every document and a separator behind it
      suffixes.bin   i32 [S]          positions of all tokens, in the order of the text up to them
      buckets.bin    i64 [V + 1]      where the positions of each token start
      starts.bin     i64 [D + 1]      where each document starts in the tokens; the last is T

The files are mapped into memory, and look-ups touch few pages. Small files are read instead, since
each map holds a file open and there may be many small segments. The separator is the id after the
vocabulary, so no context of a model matches across documents, and no continuation passes the end of
one. Longest matches, exact counts and drafts of bounded depth replace the suffix trees of
SuffixDecoding (arXiv 2411.04975) and the whole-file reads of REST (arXiv 2311.08252), at 6 to 8
bytes a token. The store around the segment records its vocabulary and depth, and checks hashes.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.indexes.suffix_array import Floats, Ints, TokenRow, checked, sort_suffixes
from ragspec.storage.filesystem import unreadable

FILES = ("tokens.bin", "suffixes.bin", "buckets.bin", "starts.bin")  # as in `Arrays`
DEPTH = 32
_LONGEST = 2**31 - 1
_SMALL = 1 << 20  # bytes of a file that is read, not mapped

# Probability that the target goes on with one of the continuations, by length of the match (0, 1,
# 2, ...; the last for all longer), and the same after the continuations of a longer match failed.
# Measured on 200 greedy answers of a small Llama (18,000 places) against 656,000 tokens of text.
FOLLOWED = (
    0.0, 0.6, 0.5, 0.5, 0.5, 0.58, 0.66, 0.68, 0.68, 0.7, 0.76, 0.82, 0.86, 0.88, 0.91, 0.93, 0.95,
)  # fmt: skip
FOLLOWED_AFTER_MISS = (0.0, 0.4, 0.4, 0.4)

_MOST = 1 << 16  # row numbers share 64 bits with tokens in the compiled look-ups


class Match(NamedTuple):
    """The longest suffix that occurs: its length, and its interval [low, high) of `suffixes`."""

    length: int
    low: int
    high: int


class Draft(NamedTuple):
    """Continuations as a tree of N nodes, best first, parents before children.

    Attributes:
        tokens, parents: i64 [N]; the parent is -1 for a child of the context's last token.
        accept_prob: f64 [N], not increasing.
        length: Length of the longest match, 0 without one.
    """

    tokens: Ints
    parents: Ints
    accept_prob: Floats
    length: int


@dataclass(frozen=True)
class DraftOptions:
    """The settings of look-ups in segments.

    256 rows and 4 contexts take twice the time and let 1.5 % more of 64 nodes be accepted (measured
    on 10 M tokens of Python source).

    Attributes:
        max_match: Longest match to look for, at most the depth to which the segment is sorted.
        max_depth: Most levels of a draft.
        rows, contexts: Most occurrences, and most suffixes, used in one look-up.
        shorter: Lengths of the suffixes to fall back on, descending.
    """

    max_match: int = 16
    max_depth: int = 16
    rows: int = 48
    contexts: int = 2
    shorter: tuple[int, ...] = (6, 4, 3, 2, 1)

    def __post_init__(self) -> None:
        for name in ("max_match", "max_depth", "rows", "contexts"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InputError(f"{name} is {getattr(self, name)}; expected 1 to {_MOST}.")
        if any(a <= b for a, b in zip(self.shorter, (*self.shorter, 0)[1:], strict=True)):
            raise InputError(f"shorter is {self.shorter}; expected descending lengths above 0.")

    @cached_property
    def chances(self) -> Floats:
        """Probability of each depth, first or after a miss: f64 [2, max_match + 1, max_depth]."""
        table = np.empty((2, self.max_match + 1, self.max_depth))
        last = len(FOLLOWED) - 1
        for length in range(self.max_match + 1):
            onward = [FOLLOWED[min(length + d, last)] for d in range(self.max_depth)]
            table[0, length] = np.multiply.accumulate(onward)
            onward[0] = FOLLOWED_AFTER_MISS[min(length, len(FOLLOWED_AFTER_MISS) - 1)]
            table[1, length] = np.multiply.accumulate(onward)
        return table

    @cached_property
    def lengths(self) -> Ints:
        """The lengths to fall back on, as an array."""
        return np.array(self.shorter, dtype=np.int64)


class Arrays(NamedTuple):
    """The arrays of a segment; see the module."""

    tokens: NDArray[Any]
    suffixes: NDArray[np.int32]
    buckets: Ints
    starts: Ints


_DEFAULTS = DraftOptions()


def build_segment(
    folder: Path, documents: Iterable[Sequence[int] | TokenRow], vocab_size: int, depth: int = DEPTH
) -> "Segment":
    """Write the files of a segment into an existing folder, and open it.

    Args:
        documents: Token ids in [0, vocab_size) each, may be a stream; empty documents count.
        depth: Tokens in which positions are compared; no match is longer.

    Raises:
        InputError: An id is outside the vocabulary, or there are more than 2^31 - 1 positions.
        StoreError: The disk is full.
    """
    if not 1 <= vocab_size < _LONGEST or depth < 2:
        raise InputError(f"got vocabulary {vocab_size}, depth {depth}; expected 1 and 2 or more.")
    rows = checked(map(np.asarray, documents), vocab_size)
    arrays: tuple[NDArray[Any], ...] = _arrays(rows, vocab_size, depth)
    for name, array, kind in zip(FILES, arrays, _types(vocab_size), strict=True):
        try:
            (folder / name).write_bytes(array.astype(kind, copy=False).data)
        except OSError as error:
            raise StoreError(
                f"{folder / name} cannot be written ({error.strerror or error}): it takes "
                f"{array.nbytes} bytes; make room on the disk, then try again."
            ) from error
    return Segment.open(folder, vocab_size, depth)


def segment_in_memory(documents: Iterable[TokenRow], vocab_size: int, depth: int) -> "Segment":
    """Return a segment like those of `build_segment`, without files."""
    arrays = _arrays(documents, vocab_size, depth)
    for array in arrays:
        array.flags.writeable = False  # as if mapped from a file: one kind of array to compile for
    return Segment(arrays, depth)


def _arrays(documents: Iterable[TokenRow], vocab_size: int, depth: int) -> Arrays:
    kind = _types(vocab_size)[0]
    border = np.array([vocab_size], dtype=kind)
    parts, starts = [border], [1]
    for document in documents:
        parts += (document.astype(kind), border)
        starts.append(starts[-1] + len(document) + 1)
        if starts[-1] > _LONGEST:
            raise InputError(f"got more than {_LONGEST} tokens; make several segments.")
    tokens = np.concatenate(parts)
    suffixes, buckets = sort_suffixes(tokens, vocab_size, depth)
    return Arrays(tokens, suffixes, buckets, np.array(starts, np.int64))


def _types(vocab_size: int) -> tuple[str, str, str, str]:
    """Return the types of `FILES`, little-endian; the separator must fit among the tokens."""
    return "<u2" if vocab_size < 2**16 else "<u4", "<i4", "<i8", "<i8"


class Segment:
    """An open segment; any number of threads and processes may read it.

    Attributes:
        tokens, suffixes, buckets, starts: See `Arrays`.
        depth: Tokens to which the suffixes are sorted.
    """

    def __init__(self, arrays: Arrays, depth: int) -> None:
        self.tokens, self.suffixes, self.buckets, self.starts = arrays
        self.vocab_size = len(self.buckets) - 1
        self.depth = depth

    def __len__(self) -> int:
        """Return the number of tokens without separators."""
        return len(self.suffixes)

    @property
    def document_count(self) -> int:
        """The number of documents, with empty ones."""
        return len(self.starts) - 1

    @classmethod
    def open(cls, folder: Path, vocab_size: int, depth: int = DEPTH) -> "Segment":
        """Map the files of a segment of this size and depth; raise StoreError if sizes disagree."""
        arrays = Arrays(*map(mapped, (folder / name for name in FILES), _types(vocab_size)))
        sizes = tuple(map(len, arrays))
        starts, buckets = (each if len(each) else [0] for each in (arrays.starts, arrays.buckets))
        # One separator comes first and one behind every document.
        expected = (int(starts[-1]), int(buckets[-1]), vocab_size + 1, sizes[0] - sizes[1])
        if sizes != expected:
            raise StoreError(
                f"the files of {folder} have {sizes} numbers, expected {expected}; make it again."
            )
        return cls(arrays, depth)

    def documents(self) -> Iterator[TokenRow]:
        """Yield the tokens of every document in order, as views of the mapped file."""
        for start, end in zip(self.starts[:-1].tolist(), self.starts[1:].tolist(), strict=True):
            yield self.tokens[start : end - 1]

    def longest_match(self, context: Sequence[int], max_match: int = 16) -> Match:
        """Return the longest suffix of the context, up to `max_match` tokens, that occurs here.

        The interval [low, high) of `suffixes` holds all its occurrences: the count is exact.

        Raises:
            InputError: `max_match` exceeds the depth of the segment.
        """
        from ragspec.retrievers.indexes.lookup import longest  # not above: numba loads slowly

        text, tail = (self.tokens, self.suffixes), self._tail(context, max_match)
        return Match(*longest(text, self.buckets, tail, max_match))

    def draft(
        self,
        context: Sequence[int],
        budget: int,
        *,
        max_depth: int | None = None,
        options: DraftOptions = _DEFAULTS,
    ) -> Draft:
        """Return the continuations of the context as a tree of at most `budget` nodes.

        Args:
            context: Token ids, the newest last.
            max_depth: Most levels of the tree; those of the options by default and at most.

        Raises:
            InputError: The longest match exceeds the depth of the segment: counts would be wrong.
        """
        from ragspec.retrievers.indexes.lookup import draft  # not above: numba loads slowly

        tail = self._tail(context, options.max_match)
        caps = (options.max_match, options.rows, options.contexts)
        arrays = (self.tokens, self.suffixes, self.buckets)
        most = budget, options.max_depth if max_depth is None else min(max_depth, options.max_depth)
        return Draft(*draft(*arrays, tail, most, caps, options.lengths, options.chances))

    def warm_up(self) -> None:
        """Load the look-ups and use them once; the first time ever compiles them."""
        self.longest_match([0], 1)
        self.draft([0], 1, options=DraftOptions(max_match=1, max_depth=1))

    def _tail(self, context: Sequence[int], length: int) -> NDArray[np.int64]:
        """Return the last tokens of the context that follow the last id outside the vocabulary."""
        if not 1 <= length <= self.depth:
            raise InputError(
                f"max_match is {length}; expected 1 to {self.depth}. Ask for less, or build deeper."
            )
        tail = context[-length:]
        if tail and (min(tail) < 0 or max(tail) >= self.vocab_size):
            foreign = [at for at, token in enumerate(tail) if not 0 <= token < self.vocab_size]
            tail = tail[foreign[-1] + 1 :]
        return np.array(tail, dtype=np.int64)


def mapped(path: Path, dtype: str) -> NDArray[Any]:
    """Return the array in a file, read-only; raise StoreError if it ends within a number."""
    try:
        size = path.stat().st_size
        if size % np.dtype(dtype).itemsize == 0:
            if size > _SMALL:
                return np.asarray(np.memmap(path, dtype=dtype, mode="r"))
            array = np.fromfile(path, dtype=dtype)
            array.flags.writeable = False  # as if mapped: one kind of array to compile for
            return array
    except OSError as error:
        raise unreadable(path, error) from error
    raise StoreError(f"{path} has {size} bytes, which is cut; make its folder again.")
