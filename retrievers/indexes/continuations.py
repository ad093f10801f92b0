"""What followed a context in a segment, as one tree: the NumPy path of `segment` look-ups.

A segment lists its positions in the order of the text up to them, newest token first. The places
where a suffix of the context ends are an interval of that list, its width an exact count, and the
intervals of shorter suffixes enclose it: one search finds them all. The continuations are drafted
as in REST (arXiv 2311.08252) and the static automaton of SAM-Decoding (arXiv 2411.10666).
Deviations: the nodes of largest reach are kept, not the most frequent of the first 5000 rows; an
interval wider than the cap is sampled at a stride, not cut in lexicographic order; shorter suffixes
fill the tree, weighted by the escape of PPM (Cleary and Witten 1984), without the occurrences that
a longer one has had. The reach of a node at depth d (0 = first drafted token) is

    sum over contexts c of  escape_c * followed(length_c, d) * (rows of c through it / rows of c)

`continuations_numba` computes the same with numba, bit for bit: keep the two in step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import InputError

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Probability that the target goes on with one of the continuations, by length of the match (0, 1,
# 2, ...; the last for all longer), and the same after the continuations of a longer one failed.
FOLLOWED = (0.0, 0.55, 0.55, 0.6, 0.65, 0.7, 0.75, 0.8, 0.84, 0.87, 0.9, 0.92, 0.94, 0.95)
FOLLOWED_AFTER_MISS = (0.0, 0.4, 0.4, 0.4)

# Numbers of rows share 64 bits with tokens in the compiled look-ups.
_MOST = 1 << 16


class Match(NamedTuple):
    """The longest suffix that occurs: its length, and its interval [low, high) of positions."""

    length: int
    low: int
    high: int


class Draft(NamedTuple):
    """Continuations as a tree of N nodes, best first, parents before children.

    tokens, parents (-1 = child of the context's last token), depths (0 = first drafted token) and
    counts (occurrences behind the contexts in use, estimated where sampled): i64 [N]. reach: f64
    [N], not increasing. origin: i64 [N, 2], (document number, token offset) of one occurrence, that
    of the best child where a node has children. length: of the longest match, 0 where there is
    none.
    """

    tokens: Ints
    parents: Ints
    reach: Floats
    counts: Ints
    depths: Ints
    origin: Ints
    length: int


@dataclass(frozen=True)
class DraftOptions:
    """How continuations are looked up; shared by all look-ups of a segment.

    max_match: longest match looked for, at most the depth that the segment is sorted to. max_depth:
    levels of a draft. rows: occurrences looked at in one look-up. contexts: suffixes used at most.
    shorter: lengths of the suffixes to fall back on, descending. followed, followed_after_miss:
    probability that the target goes on with one of the continuations, by length of the match (the
    last for longer ones). With 256 rows and 4 contexts 1.5 % more of 64 nodes is accepted (measured
    on 10 M tokens of Python source), in twice the time.
    """

    max_match: int = 16
    max_depth: int = 16
    rows: int = 48
    contexts: int = 2
    shorter: tuple[int, ...] = (6, 4, 3, 2, 1)
    followed: tuple[float, ...] = FOLLOWED
    followed_after_miss: tuple[float, ...] = FOLLOWED_AFTER_MISS

    def __post_init__(self) -> None:
        for name in ("max_match", "max_depth", "rows", "contexts"):
            if not 1 <= getattr(self, name) <= _MOST:
                raise InputError(f"{name} is {getattr(self, name)}; expected 1 to {_MOST}.")
        if any(a <= b for a, b in zip(self.shorter, (*self.shorter, 0)[1:], strict=True)):
            raise InputError(f"shorter is {self.shorter}; expected descending lengths above 0.")
        for table in (self.followed, self.followed_after_miss):
            if not table or not all(0.0 <= p <= 1.0 for p in table):
                raise InputError(f"got probabilities {table}; expected numbers from 0 to 1.")

    @cached_property
    def chances(self) -> Floats:
        """f64 [2, max_match + 1, max_depth]: followed to a depth, first or after a miss."""
        table = np.empty((2, self.max_match + 1, self.max_depth))
        last = len(self.followed) - 1
        for length in range(self.max_match + 1):
            onward = [self.followed[min(length + d, last)] for d in range(self.max_depth)]
            table[0, length] = np.multiply.accumulate(onward)
            onward[0] = self.followed_after_miss[min(length, len(self.followed_after_miss) - 1)]
            table[1, length] = np.multiply.accumulate(onward)
        return table

    @cached_property
    def lengths(self) -> Ints:
        """The lengths to fall back on as an array."""
        return np.array(self.shorter, dtype=np.int64)


class Arrays(NamedTuple):
    """A segment's arrays: tokens u16 or u32 [T], suffixes i32 [S], buckets i64 [V + 1], starts.

    suffixes: all positions but those of separators, in the order of the text up to them (see
    `suffix_array`). buckets: where the positions of each token start. starts i64 [documents + 1]:
    where documents begin; the last is T. A separator (id V) stands first and behind every document.
    """

    tokens: NDArray[Any]
    suffixes: NDArray[np.int32]
    buckets: Ints
    starts: Ints


class _Rows(NamedTuple):
    """Sampled occurrences: where each one's continuation starts, and the context it belongs to."""

    starts: Ints
    context: Ints
    weights: Floats
    strides: Ints


class NumpyLookup:
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
        wanted, text = list(context[: -max_match - 1 : -1]), self._text(max_match)
        at = bisect_left(self._suffixes, wanted, low, high, key=text)
        beside = [self._suffixes[index] for index in (at - 1, at) if low <= index < high]
        length = max(_shared(text(position), wanted) for position in beside)
        return Match(length, *self._interval(wanted, length, (low, high), (at, at)))

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
        self, wanted: Sequence[int], length: int, outer: tuple[int, int], inner: tuple[int, int]
    ) -> tuple[int, int]:
        """Return the interval of a length: within that of the last token, around a longer one's."""
        if length == 1:
            return outer
        phrase, text = list(wanted[:length]), self._text(length)
        low = bisect_left(self._suffixes, phrase, outer[0], inner[0], key=text)
        return low, bisect_right(self._suffixes, phrase, inner[1], outer[1], key=text)

    def draft(
        self, context: Sequence[int], budget: int, depth: int, options: DraftOptions
    ) -> Draft:
        """Return the tree of at most `budget` nodes and `depth` levels; see `Segment.draft`."""
        match = self.longest_match(context, options.max_match)
        if not match.length or budget < 1 or depth < 1:
            none = np.empty(0, dtype=np.int64)
            return Draft(none, none, np.empty(0), none, none, none.reshape(0, 2), match.length)
        return self._grow(self._rows(context, match, options), budget, depth, match.length)

    def _rows(self, context: Sequence[int], match: Match, options: DraftOptions) -> _Rows:
        """Collect occurrences of the longest match, then of shorter suffixes, up to the cap."""
        tokens, suffixes = self._arrays.tokens, self._arrays.suffixes
        starts: list[Ints] = []
        weights, strides = [], []
        taken, escape, before = 0, 1.0, 0
        for length, low, high in self._intervals(context, match, options):
            room = options.rows - taken
            stride = max(1, -(-(high - low) // room))
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
            strides.append(stride)
            escape *= 1.0 - chances[0]
            taken, before = taken + len(at), length
            if taken >= options.rows or len(starts) == options.contexts:
                break
        context_of = np.repeat(np.arange(len(starts)), [len(at) for at in starts])
        return _Rows(np.concatenate(starts), context_of, np.array(weights), np.array(strides))

    def _intervals(
        self, context: Sequence[int], match: Match, options: DraftOptions
    ) -> Iterator[Match]:
        """Yield the longest match, then the wider intervals of shorter suffixes."""
        yield match
        outer, inner, wanted = self._bucket(context), (match.low, match.high), context[::-1]
        for length in options.shorter:
            if length < match.length:
                interval = self._interval(wanted, length, outer, inner)
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
        reach, count = np.zeros(len(at)), np.zeros(len(at), dtype=np.int64)
        for c, stride in enumerate(rows.strides):
            through = np.concatenate(([0], np.cumsum(context == c)))
            part = through[high] - through[low]
            reach += rows.weights[c, level] * part
            count += part * stride
        token = table.T.ravel()[at]
        reach[token == separator] = -1.0
        best = _largest(reach, budget)
        level, low, high = level[best], low[best], high[best]
        number = np.full(len(at), -1)
        number[best] = np.arange(len(best))
        above = np.cumsum(flags)[(level - 1) * n + low] - 1
        parents = np.where(level > 0, number[above], -1)
        origin = self._origins(rows.starts, order, level, low, high, parents)
        return Draft(
            token[best].astype(np.int64), parents, reach[best], count[best], level, origin, length
        )

    def _origins(
        self, starts: Ints, order: Ints, level: Ints, low: Ints, high: Ints, parents: Ints
    ) -> Ints:
        """Return (document, offset) of one occurrence of each node, its best child's if it can."""
        rank = np.append(order, 0)  # rows come by context, the longest first
        of = np.minimum.reduceat(rank, np.stack((low, high), 1).ravel())[::2].tolist()
        up = parents.tolist()
        for node in range(len(of) - 1, -1, -1):
            if up[node] >= 0:
                of[up[node]] = of[node]
        position = starts[of] + level
        document = np.searchsorted(self._arrays.starts, position, side="right") - 1
        return np.stack((document, position - self._arrays.starts[document]), axis=1)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many leading tokens two sequences share."""
    shared = 0
    while shared < min(len(a), len(b)) and a[shared] == b[shared]:
        shared += 1
    return shared


def _largest(reach: Floats, budget: int) -> Ints:
    """Return the indices of the `budget` largest values above 0, largest first, stable."""
    if len(reach) > budget:
        least = np.partition(reach, len(reach) - budget)[len(reach) - budget]
        near = np.flatnonzero(reach >= max(least, 0.0))
    else:
        near = np.flatnonzero(reach >= 0.0)
    return near[np.argsort(-reach[near], kind="stable")][:budget]
