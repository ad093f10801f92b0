"""Look-ups in a segment with NumPy: the reference of the compiled ones, bit for bit."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ragspec.retrievers.indexes.continuations import (
    Arrays,
    Draft,
    DraftOptions,
    Floats,
    Ints,
    Match,
)


class _Rows(NamedTuple):
    """Sampled occurrences: where each one's continuation starts, and the context it belongs to."""

    starts: Ints
    context: Ints
    weights: Floats


class ReferenceLookup:
    """Look-ups in the arrays of a segment without compiled code."""

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._tokens = memoryview(arrays.tokens.data)
        self._suffixes = memoryview(arrays.suffixes.data)
        self._buckets = memoryview(arrays.buckets.data)
        self._separator = len(arrays.buckets) - 1

    def longest_match(self, context: Sequence[int], max_match: int) -> Match:
        """Return the longest suffix that occurs, its end at or beside where the context sorts."""
        low, high = self._bucket(context)
        if low == high:
            return Match(0, 0, 0)
        selection, text = list(context[: -max_match - 1 : -1]), self._text(max_match)
        at = bisect_left(self._suffixes, selection, low, high, key=text)
        beside = [self._suffixes[index] for index in (at - 1, at) if low <= index < high]
        length = max(_shared(text(position), selection) for position in beside)
        return Match(length, *self._interval(selection, length, (low, high), (at, at)))

    def _bucket(self, context: Sequence[int]) -> tuple[int, int]:
        """Return the interval of the last token, the empty one at 0 where there is none."""
        if not len(context):
            return 0, 0
        return self._buckets[context[-1]], self._buckets[context[-1] + 1]

    def _text(self, length: int) -> Callable[[int], list[int]]:
        """Return what gives the last `length` tokens up to a position, newest first."""
        tokens = self._tokens

        def text(position: int) -> list[int]:
            return tokens[max(0, position + 1 - length) : position + 1].tolist()[::-1]

        return text

    def _interval(
        self, selection: Sequence[int], length: int, outer: tuple[int, int], inner: tuple[int, int]
    ) -> tuple[int, int]:
        """Return the interval of a length: within that of the last token, around a longer one's."""
        if length == 1:
            return outer
        phrase, text = list(selection[:length]), self._text(length)
        low = bisect_left(self._suffixes, phrase, outer[0], inner[0], key=text)
        return low, bisect_right(self._suffixes, phrase, inner[1], outer[1], key=text)

    def draft(
        self, context: Sequence[int], budget: int, depth: int, options: DraftOptions
    ) -> Draft:
        """Return the tree of at most `budget` nodes and `depth` levels; see `Segment.draft`."""
        match = self.longest_match(context, options.max_match)
        if not match.length or budget < 1 or depth < 1:
            none = np.empty(0, dtype=np.int64)
            return Draft(none, none, np.empty(0), none, match.length)
        return self._grow(self._rows(context, match, options), budget, depth, match.length)

    def _rows(self, context: Sequence[int], match: Match, options: DraftOptions) -> _Rows:
        """Collect occurrences of the longest match, then of shorter suffixes, up to the cap."""
        tokens, suffixes = self._arrays.tokens, self._arrays.suffixes
        starts: list[Ints] = []
        weights = []
        taken, escape, before = 0, 1.0, 0
        for length, low, high in self._intervals(context, match, options):
            stride = max(1, -(-(high - low) // (options.rows - taken)))
            at = suffixes[low:high:stride].astype(np.int64)
            if before:  # without the occurrences of the longer suffix
                back = np.arange(length, before)
                longer = np.array(context[::-1][length:before])
                at = at[(tokens[at[:, None] - back] != longer).any(axis=1)]
                if not len(at):
                    continue
            chances = options.chances[int(before > 0), length]
            weights.append(escape * chances / len(at))
            starts.append(at + 1)
            escape *= 1.0 - chances[0]
            taken, before = taken + len(at), length
            if taken >= options.rows or len(starts) == options.contexts:
                break
        context_of = np.repeat(np.arange(len(starts)), [len(at) for at in starts])
        return _Rows(np.concatenate(starts), context_of, np.array(weights))

    def _intervals(
        self, context: Sequence[int], match: Match, options: DraftOptions
    ) -> Iterator[Match]:
        """Yield the longest match, then the wider intervals of shorter suffixes."""
        yield match
        outer, inner, selection = self._bucket(context), (match.low, match.high), context[::-1]
        for length in options.shorter:
            if length < match.length:
                interval = self._interval(selection, length, outer, inner)
                if interval != inner:
                    yield Match(length, *interval)
                inner = interval

    def _grow(self, rows: _Rows, budget: int, depth: int, length: int) -> Draft:
        """Make the tree of rows: distinct prefixes are its nodes, the best `budget` are kept."""
        separator, n = self._separator, len(rows.starts)
        table = np.take(self._arrays.tokens, rows.starts[:, None] + np.arange(depth), mode="clip")
        table[np.logical_or.accumulate(table >= separator, axis=1)] = separator
        packed = table.astype(">u4").view(f"S{4 * depth}").ravel()
        order = np.argsort(packed, kind="stable")
        table, context = table[order], rows.context[order]
        new = np.ones((n, depth), dtype=np.bool_)
        np.logical_or.accumulate(table[1:] != table[:-1], axis=1, out=new[1:])
        flags = np.ascontiguousarray(new.T).ravel()
        at = np.flatnonzero(flags)  # by depth, then by row: a node's first row
        level, low = np.divmod(at, n)
        high = np.minimum(np.append(at[1:], depth * n), (level + 1) * n) - level * n
        accept_prob = np.zeros(len(at))
        for c in range(len(rows.weights)):
            through = np.concatenate(([0], np.cumsum(context == c)))
            accept_prob += rows.weights[c, level] * (through[high] - through[low])
        token = table.T.ravel()[at]
        accept_prob[token == separator] = -1.0
        best = _largest(accept_prob, budget)
        level, low = level[best], low[best]
        number = np.full(len(at), -1)
        number[best] = np.arange(len(best))
        above = np.cumsum(flags)[(level - 1) * n + low] - 1
        parents = np.where(level > 0, number[above], -1)
        return Draft(token[best].astype(np.int64), parents, accept_prob[best], level, length)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def _largest(accept_prob: Floats, budget: int) -> Ints:
    """Return the indices of the `budget` largest values above 0, largest first, stable."""
    if len(accept_prob) > budget:
        least = np.partition(accept_prob, len(accept_prob) - budget)[len(accept_prob) - budget]
        near = np.flatnonzero(accept_prob >= max(least, 0.0))
    else:
        near = np.flatnonzero(accept_prob >= 0.0)
    return near[np.argsort(-accept_prob[near], kind="stable")][:budget]
