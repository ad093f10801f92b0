"""What followed a context in a segment, as one tree: its types and settings.

A segment lists its positions in the order of the text up to them, newest token first. The places
where a suffix of the context ends are an interval of that list, its width an exact count, and the
intervals of shorter suffixes enclose it: one search finds them all. The continuations are drafted
as in REST (arXiv 2311.08252) and the static automaton of SAM-Decoding (arXiv 2411.10666).
Deviations: the nodes of largest reach are kept, not the most frequent of the first 5000 rows; an
interval wider than the cap is sampled at a stride, not cut in lexicographic order; shorter suffixes
fill the tree, weighted by the escape of PPM (Cleary and Witten 1984), without the occurrences that
a longer one has had. The reach of a node at depth d (0 = first drafted token) is

    sum over contexts c of  escape_c * followed(length_c, d) * (rows of c through it / rows of c)

`lookup` computes it; the tests compare with a NumPy reference, bit for bit.
"""

from __future__ import annotations

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
    accept_prob: Floats
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
