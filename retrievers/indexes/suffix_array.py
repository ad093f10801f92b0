"""Suffix arrays of token texts read from right to left, sorted to a bounded depth, in plain NumPy.

A suffix array (Manber and Myers 1993) lists the positions of a text so that all places where a
phrase occurs lie side by side. Drafting asks where the last tokens of a context stood before: the
shorter the suffix of the context, the wider the interval around one and the same place, once
positions are ordered by the text up to them, newest token first. So one search finds the longest
match and those to fall back on, where an array of the text read forwards needs one for each length.
Contexts are compared in their last `depth` tokens, and by position where these agree.
Deviation from prefix doubling, which sorts the whole text once a round: positions are dealt into
buckets by their token, and small runs of buckets are sorted one after the other by words of several
tokens packed into 64 bits; only positions that still tie take part in the next word. Beside the
result this needs scratch for one run, not for the text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Positions = NDArray[np.int32]
Progress = Callable[[int, int], None]

# Positions sorted at a time: few enough that keys and order stay in the processor's cache.
_RUN = 1 << 17
_BLOCK = 1 << 20
_WORD_BITS = 63
_LONGEST = 2**31 - 1


def count_first_tokens(tokens: Tokens, separator: int) -> NDArray[np.int64]:
    """Return where the positions of each token start: i64 [separator + 1], the last the total.

    Separators (the largest id) are not counted.
    """
    counts = np.zeros(separator + 1, dtype=np.int64)
    for start in range(0, len(tokens), _BLOCK):
        counts += np.bincount(tokens[start : start + _BLOCK], minlength=separator + 1)
    buckets = np.zeros(separator + 1, dtype=np.int64)
    np.cumsum(counts[:-1], out=buckets[1:])
    return buckets


def sort_suffixes(
    tokens: Tokens,
    separator: int,
    *,
    depth: int = 32,
    buckets: NDArray[np.int64] | None = None,
    out: Positions | None = None,
    progress: Progress | None = None,
) -> Positions:
    """Return the positions of all tokens but separators, sorted by the text up to them: i32 [S].

    tokens: ids up to `separator`, which parts the texts and stands first and last. Position p is
    compared by the tokens at p, p - 1, ..., `depth` of them (before the first stand separators),
    then by p itself. buckets: what `count_first_tokens` returned. out: where to write (a file
    mapped into memory). progress: called with (sorted positions, all of them). Raises InputError
    where the text is too long, or has no separator first and last.
    """
    ends = not len(tokens) or (int(tokens[0]), int(tokens[-1])) != (separator, separator)
    if ends or len(tokens) > _LONGEST or depth < 1:
        raise InputError(
            f"got {len(tokens)} tokens to sort to depth {depth}; expected 1 to {_LONGEST} tokens, "
            f"the separator {separator} first and last, and a depth of at least 1."
        )
    if buckets is None:
        buckets = count_first_tokens(tokens, separator)
    total = int(buckets[-1])
    suffixes = np.empty(total, dtype=np.int32) if out is None else out
    _deal(tokens, buckets, suffixes)
    for start, end in _runs(buckets):
        suffixes[start:end] = _sort_run(tokens, suffixes[start:end], separator, depth)
        if progress is not None:
            progress(end, total)
    return suffixes


def _deal(tokens: Tokens, buckets: NDArray[np.int64], out: Positions) -> None:
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


def _stable_order(values: Tokens) -> NDArray[np.int64]:
    """Return the stable order of values; NumPy's radix sort takes 16 bits at a time."""
    if values.dtype == np.uint16:
        return np.argsort(values, kind="stable")
    low = np.argsort(values.astype(np.uint16), kind="stable")  # the cast keeps the low half
    high = (values >> 16).astype(np.uint16)[low]
    return low[np.argsort(high, kind="stable")]


def _runs(buckets: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield ranges of whole buckets with about `_RUN` positions each."""
    total, start = int(buckets[-1]), 0
    while start < total:
        last = int(np.searchsorted(buckets, start + _RUN, side="right")) - 1
        end = int(buckets[last])
        if end <= start:  # one bucket alone is larger
            end = int(buckets[np.searchsorted(buckets, start, side="right")])
        yield start, end
        start = end


def _sort_run(tokens: Tokens, run: Positions, separator: int, depth: int) -> NDArray[np.int64]:
    """Return the positions of a run, which come ordered by token, in their final order."""
    bits = max(1, separator.bit_length())
    at = run.astype(np.int64)
    places = np.arange(len(at))
    first = np.take(tokens, at)
    starts = _changes(first)
    known = 1
    places, starts = _ties(places, starts)
    while len(places) and known < depth:
        group = np.cumsum(starts)
        width = min((_WORD_BITS - int(group[-1]).bit_length()) // bits, depth - known)
        here = at[places]
        key = group
        for back in range(known, known + width):
            word = np.take(tokens, here - back, mode="clip")
            key = np.bitwise_or(key << bits, word, dtype=np.int64)
        order = np.argsort(key)
        at[places] = here[order]
        places, starts = _ties(places, _changes(key[order]))
        known += width
    if len(places):  # equal to the full depth
        tied = (np.cumsum(starts) << 32) | at[places]
        tied.sort()
        at[places] = tied & 0xFFFFFFFF
    return at


def _changes(values: NDArray[Any]) -> NDArray[np.bool_]:
    """Mark the values that differ from the one before."""
    marks = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=marks[1:])
    return marks


def _ties(
    places: NDArray[np.int64], starts: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Keep the members of groups of two or more; `starts` marks the first of each group."""
    alone = starts & np.append(starts[1:], True)
    keep = ~alone
    return places[keep], starts[keep]
