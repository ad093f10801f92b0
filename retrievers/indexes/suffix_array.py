"""Checks of token ids, and the suffix array of a token text."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError

TokenRow = NDArray[np.integer]
Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Positions = NDArray[np.int32]
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_RUN = 1 << 17  # positions sorted at a time, so that keys and order fit the processor's cache
_BLOCK = 1 << 20
_WORD_BITS = 63


def token_row(tokens: object) -> TokenRow:
    """Return token ids as an array [T]; raise InputError if they are no single row of integers."""
    expected = "expected one row of token ids for each document."
    try:
        ids = np.asarray(tokens)
    except ValueError as error:
        raise InputError(f"got rows of different lengths; {expected}") from error
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        raise InputError(f"got tokens of shape {ids.shape} and type {ids.dtype}; {expected}")
    return ids


def check_ids(row: TokenRow, vocab_size: int, name: str) -> None:
    """Raise InputError, with the document's name, unless all ids [T] are in [0, vocab_size)."""
    if len(row) and (row.min() < 0 or row.max() >= vocab_size):
        raise InputError(
            f"{name} holds ids from {row.min()} to {row.max()}; expected 0 to {vocab_size - 1}: "
            "tokenize it with the tokenizer of the store."
        )


def checked(rows: Iterable[TokenRow], vocab_size: int) -> Iterator[TokenRow]:
    """Yield the rows; raise InputError, with the document's number, if an id is out of range."""
    for number, row in enumerate(rows):
        check_ids(row, vocab_size, f"document {number}")
        yield row


def sort_suffixes(tokens: Tokens, separator: int, depth: int) -> tuple[Positions, Ints]:
    """Return the positions of all tokens but separators, sorted by the text up to them: i32 [S].

    Position p is compared by the tokens at p, p - 1, ..., `depth` of them (separators before the
    first), then by p itself.

    Args:
        tokens: Ids up to `separator`, which comes first, last and between texts.

    Returns:
        The positions, and where those of each token start: i64 [separator + 1]; the last is S.
    """
    counts = np.zeros(separator + 1, dtype=np.int64)
    for start in range(0, len(tokens), _BLOCK):
        counts += np.bincount(tokens[start : start + _BLOCK], minlength=separator + 1)
    buckets = np.append(0, np.cumsum(counts[:-1]))
    suffixes = np.empty(int(buckets[-1]), dtype=np.int32)
    _deal(tokens, buckets, suffixes)
    for start, end in _runs(buckets):
        suffixes[start:end] = _sort_run(tokens, suffixes[start:end], separator, depth)
    return suffixes, buckets


def _deal(tokens: Tokens, buckets: Ints, out: Positions) -> None:
    """Write the positions by first token, within a token in ascending order."""
    separator = len(buckets) - 1
    free = np.append(buckets[:-1], 0)
    for start in range(0, len(tokens), _BLOCK):
        block = tokens[start : start + _BLOCK]
        order = _stable_order(block)
        ordered = block[order]
        keep = int(np.searchsorted(ordered, separator))
        order, ordered = order[:keep], ordered[:keep]
        counts = np.bincount(ordered, minlength=separator + 1)
        # The k-th position of a token goes to the k-th free place of its bucket.
        shift = free - np.concatenate(([0], np.cumsum(counts[:-1])))
        out[shift[ordered] + np.arange(keep)] = order + start
        free += counts


def _stable_order(values: Tokens) -> Ints:
    """Return the stable order of values; NumPy's radix sort takes 16 bits at a time."""
    if values.dtype == np.uint16:
        return np.argsort(values, kind="stable")
    low = np.argsort(values.astype(np.uint16), kind="stable")  # the cast keeps the low half
    return low[np.argsort((values >> 16).astype(np.uint16)[low], kind="stable")]


def _runs(buckets: Ints) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole buckets with about `_RUN` positions each."""
    total, start = int(buckets[-1]), 0
    while start < total:
        first, behind = np.searchsorted(buckets, (start, start + _RUN), side="right")
        end = int(buckets[max(first, behind - 1)])  # one bucket alone may be larger
        yield start, end
        start = end


def _sort_run(tokens: Tokens, run: Positions, separator: int, depth: int) -> Ints:
    """Return the positions of a run, which is ordered by token, in their final order."""
    bits = max(1, separator.bit_length())
    at = run.astype(np.int64)
    places, starts = _ties(np.arange(len(at)), _changes(np.take(tokens, at)))
    compared = 1  # tokens
    while len(places) and compared < depth:
        group = np.cumsum(starts)
        width = min((_WORD_BITS - int(group[-1]).bit_length()) // bits, depth - compared)
        here = at[places]
        key = group
        for back in range(compared, compared + width):
            word = np.take(tokens, here - back, mode="clip")
            key = np.bitwise_or(key << bits, word, dtype=np.int64)
        order = np.argsort(key)
        at[places] = here[order]
        places, starts = _ties(places, _changes(key[order]))
        compared += width
    if len(places):  # equal to the full depth
        tied = (np.cumsum(starts) << 32) | at[places]
        tied.sort()
        at[places] = tied & 0xFFFFFFFF
    return at


def _changes(values: NDArray[np.generic]) -> NDArray[np.bool_]:
    """Mark the values that differ from the one before."""
    return np.append(True, values[1:] != values[:-1])


def _ties(places: Ints, starts: NDArray[np.bool_]) -> tuple[Ints, NDArray[np.bool_]]:
    """Return the members of groups of two or more; `starts` marks the first of each group."""
    keep = ~(starts & np.append(starts[1:], True))
    return places[keep], starts[keep]
