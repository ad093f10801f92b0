"""The look-ups of a segment, compiled with numba.

Nodes are taken best first from a heap and expanded only then, so that most are never made. The
kernels release the GIL and are cached on disk. Positions read from a file are checked before use: a
damaged segment gives a useless draft, not a crash.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.indexes.suffix_array import Floats, Ints, Tokens

Function = TypeVar("Function", bound=Callable[..., Any])
Text = tuple[Tokens, NDArray[np.int32]]

ROW = (1 << 20) - 1


def compiled(function: Function) -> Function:
    """Return a function that numba compiles at the first call, cached on disk if possible."""
    import numba

    try:
        kernel = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder for the cache is writable: compile in every process
        kernel = numba.njit(nogil=True, error_model="numpy")(function)
    return cast("Function", kernel)


@compiled
def place(suffixes: NDArray[np.int32], index: int, size: int) -> int:
    """Return a position of the suffix array, the last position of the text if it is damaged."""
    position = int(suffixes[index])
    return position if 0 <= position < size else size - 1


@compiled
def agree(tokens: Tokens, position: int, tail: Ints, most: int) -> int:
    """Return how many tokens up to `position` agree with the end of `tail`; the first one does."""
    same, last = 1, len(tail) - 1
    while same < most and position >= same and int(tokens[position - same]) == tail[last - same]:
        same += 1
    return same


@compiled
def bucket(suffixes: NDArray[np.int32], buckets: Ints, tail: Ints) -> tuple[int, int]:
    """Return the interval of the last token, empty if it does not occur."""
    if len(tail) == 0:
        return 0, 0
    low = max(0, int(buckets[tail[-1]]))
    return low, max(low, min(len(suffixes), int(buckets[tail[-1] + 1])))


@compiled
def longest(text: Text, buckets: Ints, tail: Ints, max_match: int) -> tuple[int, int, int]:
    """Return (length, low, high) of the longest suffix of `tail` that occurs."""
    tokens, suffixes = text
    low, high = bucket(suffixes, buckets, tail)
    outer, size, most, best = (low, high), len(tokens), min(max_match, len(tail)), 0
    while low < high:
        middle = (low + high) >> 1
        position = place(suffixes, middle, size)
        same = agree(tokens, position, tail, most)
        best = max(best, same)
        if same < most and position >= same and int(tokens[position - same]) < tail[-1 - same]:
            low = middle + 1
        else:
            high = middle
    if best == 0:
        return 0, 0, 0
    low, high = widen(text, tail, best, outer, (low, low))
    return best, low, high


@compiled
def edge(text: Text, tail: Ints, length: int, yes: int, limit: int, direction: int) -> int:
    """Return the first index from `yes` on, in `direction`, with less than `length` equal tokens.

    Gallops, then bisects; `limit` is the first index not to look at.
    """
    tokens, suffixes = text
    size, no, step = len(tokens), yes + direction, direction
    while (limit - no) * direction > 0:
        if agree(tokens, place(suffixes, no, size), tail, length) < length:
            break
        yes, step = no, 2 * step
        no += step
    no = min(no, limit) if direction > 0 else max(no, limit)
    while (no - yes) * direction > 1:
        middle = (no + yes) >> 1
        if agree(tokens, place(suffixes, middle, size), tail, length) == length:
            yes = middle
        else:
            no = middle
    return no


@compiled
def widen(
    text: Text, tail: Ints, length: int, outer: tuple[int, int], inner: tuple[int, int]
) -> tuple[int, int]:
    """Return the interval of a length, given the interval of a longer one."""
    if length == 1:
        return outer
    low = edge(text, tail, length, inner[0], outer[0] - 1, -1) + 1
    return low, edge(text, tail, length, inner[1] - 1, outer[1], 1)


@compiled
def collect(
    text: Text,
    tail: Ints,
    match: tuple[int, int, int],
    outer: tuple[int, int],
    caps: tuple[int, int, int],
    shorter: Ints,
    chances: Floats,
) -> tuple[Ints, Ints, Floats]:
    """Sample occurrences of the longest match, then of shorter suffixes, up to the cap of rows.

    Returns:
        Start and context of every continuation [R], and weights [contexts, D].
    """
    (tokens, suffixes), cap = text, caps[1]
    size = len(tokens)
    places, context = np.empty(cap, dtype=np.int64), np.empty(cap, dtype=np.int64)
    weights = np.empty((caps[2], chances.shape[2]))
    (length, low, high), escape = match, 1.0
    taken, used, before, fallback = 0, 0, 0, 0
    while True:
        end, stride = taken, max(1, -(-(high - low) // (cap - taken)))
        for index in range(low, high, stride):
            position = place(suffixes, index, size)
            # The occurrences of the longer suffix before are already taken.
            if before == 0 or agree(tokens, position, tail, before) < before:
                places[end], context[end] = position + 1, used
                end += 1
        if end > taken:
            chance = chances[1 if before else 0, length]
            weights[used] = escape * chance / (end - taken)
            escape *= 1.0 - chance[0]
            taken, used, before = end, used + 1, length
        width = high - low
        while fallback < len(shorter) and high - low == width:
            if shorter[fallback] < match[0]:
                length = shorter[fallback]
                low, high = widen(text, tail, length, outer, (low, high))
            fallback += 1
        if high - low == width or taken >= cap or used == caps[2]:
            return places[:taken], context[:taken], weights[:used]


@compiled
def arrange(
    tokens: Tokens, places: Ints, keys: Ints, low: int, high: int, level: int, separator: int
) -> None:
    """Sort rows low to high by their token at a level, then by number: keys token << 20 | row."""
    size = len(tokens)
    for at in range(low, high):
        row = keys[at] & ROW
        ahead = places[row] + level
        token = min(int(tokens[ahead]), separator) if ahead < size else separator
        key, to = (token << 20) | row, at
        while to > low and keys[to - 1] > key:  # by insertion: rows are few, and mostly in order
            keys[to] = keys[to - 1]
            to -= 1
        keys[to] = key


@compiled
def grow(
    tokens: Tokens, places: Ints, context: Ints, weights: Floats, limits: tuple[int, int, int]
) -> tuple[Ints, Floats]:
    """Return the best nodes (token, parent) i64 [2, N], and their accept_prob f64 [N].

    Args:
        limits: Most nodes, most levels, and the separator.
    """
    budget, depth, separator = limits
    n = len(places)
    keys, part = np.arange(n), np.zeros(len(weights), dtype=np.int64)
    # (-accept_prob, level, low, high, parent): likelier first, then shallower, then earlier.
    heap = [(0.0, 0, 0, 0, 0) for _ in range(0)]  # empty, of this type
    chosen, accept_prob = np.empty((2, budget), dtype=np.int64), np.empty(budget)
    taken, level, low, high = 0, 0, 0, n  # of the children to make next, those of the root first
    while True:
        at = low if level < depth else high
        arrange(tokens, places, keys, at, high, level, separator)
        while at < high and keys[at] >> 20 != separator:
            first, token = at, keys[at] >> 20
            part[:] = 0
            while at < high and keys[at] >> 20 == token:
                part[context[keys[at] & ROW]] += 1
                at += 1
            chance = 0.0
            for c in range(len(part)):
                chance += weights[c, level] * part[c]
            heappush(heap, (-chance, level, first, at, taken - 1))
        if len(heap) == 0 or taken == budget:
            return chosen[:, :taken], accept_prob[:taken]
        cost, level, low, high, parent = heappop(heap)
        chosen[0, taken], chosen[1, taken] = keys[low] >> 20, parent
        accept_prob[taken] = -cost
        taken, level = taken + 1, level + 1


@compiled
def draft(
    tokens: Tokens,
    suffixes: NDArray[np.int32],
    buckets: Ints,
    tail: Ints,
    most: tuple[int, int],
    caps: tuple[int, int, int],
    shorter: Ints,
    chances: Floats,
) -> tuple[Ints, Ints, Floats, int]:
    """Return the fields of a `Draft`.

    Args:
        most: Most nodes and most levels.
        caps: The longest match, most rows and most contexts.
    """
    (budget, depth), text = most, (tokens, suffixes)
    match = longest(text, buckets, tail, caps[0])
    if match[0] == 0 or budget < 1 or depth < 1:
        none = np.empty(0, dtype=np.int64)
        return none, none, np.empty(0), match[0]
    outer = bucket(suffixes, buckets, tail)
    places, context, weights = collect(text, tail, match, outer, caps, shorter, chances)
    chosen, accept_prob = grow(tokens, places, context, weights, (budget, depth, len(buckets) - 1))
    return chosen[0], chosen[1], accept_prob, match[0]
