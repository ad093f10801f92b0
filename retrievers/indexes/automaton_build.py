"""Building the suffix automaton of long texts as compiled code (numba, the `fast` extra).

The same states, edges, counts and ends as `SuffixAutomaton.build` gives, in flat arrays, which the
automaton then takes over: what grows token by token is small, but a prompt may be long. Edges
beyond a state's first lie in a chain by state, in the order in which they were made, and are found
through a table of open addresses. Without numba the module is plain Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.indexes.continuations import compiled

# On text that repeats one token the chain of suffix links is as long as the text. Counts and ends
# of the shorter suffixes beyond this many links may then lag; the matches themselves stay exact.
MAX_LINKS = 32

Ints = NDArray[np.int64]

_MIX = 0x9E3779B1  # mixes bits: the golden ratio of 2 ** 32


def warm_up() -> None:
    """Load the compiled code, so that texts are built with it from now on; seconds at first."""
    build([0, 1, 0, 2, 0, 1], [False] * 6)


def compiled_already() -> bool:
    """Return whether the code was compiled, or loaded, by this process."""
    return bool(getattr(fill, "signatures", ()))


def build(
    tokens: Sequence[int], document: Sequence[bool]
) -> tuple[list[list[int]], dict[int, dict[int, int]]]:
    """Return the automaton of the tokens.

    The lists are length, link, count, latest, cited, first_token and first_target by state; the
    dictionary holds the further edges. The last state is that of the whole text.
    """
    n = len(tokens)
    states = np.full((7, 2 * n + 2), -1, dtype=np.int64)
    size = 1 << max(4, (4 * n).bit_length())
    slots, head, tail = (np.full(k, -1, dtype=np.int64) for k in (size, 2 * n + 2, 2 * n + 2))
    edges = np.full((4, 2 * n + 8), -1, dtype=np.int64)
    ids = np.asarray(tokens, dtype=np.int64)
    marks = np.asarray(document, dtype=np.bool_)
    used, _ = fill(ids, marks, states, slots, head, tail, edges)
    rows: list[list[int]] = states[:, :used].tolist()
    more: dict[int, dict[int, int]] = {}
    listed = np.empty((int((edges[0] >= 0).sum()), 3), dtype=np.int64)
    spread(head[:used], edges, listed)
    for state, group in groupby(listed.tolist(), key=itemgetter(0)):
        more[state] = {token: target for _, token, target in group}
    return rows, more


@compiled
def find(slots: Ints, edges: Ints, state: int, token: int) -> int:
    """Return the slot of an edge, or of the place where it would be put."""
    mask = len(slots) - 1
    key = state * 2097169 + token
    at = ((((key ^ (key >> 23)) & 0x3FFFFFFF) * _MIX) >> 12) & mask
    while slots[at] >= 0 and (edges[0, slots[at]] != state or edges[1, slots[at]] != token):
        at = (at + 1) & mask
    return at


@compiled
def add(slots: Ints, head: Ints, tail: Ints, edges: Ints, at: int, number: int, edge: Any) -> int:
    """Put (state, token, target) as edge `number` into slot `at`; return the next number."""
    state, token, target = edge
    edges[0, number], edges[1, number], edges[2, number] = state, token, target
    slots[at] = number
    if head[state] < 0:
        head[state] = number
    else:
        edges[3, tail[state]] = number
    tail[state] = number
    return number + 1


@compiled
def count_newest(states: Ints, last: int, end: int, cited: bool) -> None:
    """Count the end of the newest token in its suffixes, now that a token follows it."""
    state = last
    for _ in range(MAX_LINKS):
        if state <= 0:
            break
        states[2, state] += 1
        states[3, state] = end
        if cited:
            states[4, state] = end
        state = states[1, state]


@compiled
def redirect(
    states: Ints, slots: Ints, edges: Ints, state: int, token: int, result: int, half: int
) -> None:
    """Let the edges that led to `result` from here upwards lead to its half."""
    while state >= 0:
        if states[5, state] == token:
            if states[6, state] != result:
                break
            states[6, state] = half
        else:
            edge = slots[find(slots, edges, state, token)]
            if edge < 0 or edges[2, edge] != result:
                break
            edges[2, edge] = half
        state = states[1, state]


@compiled
def fill(
    tokens: Ints, document: Any, states: Ints, slots: Ints, head: Ints, tail: Ints, edges: Ints
) -> tuple[int, int]:
    """Build the automaton into the arrays; return the number of states and of further edges."""
    states[0, 0] = states[2, 0] = 0
    used, instance, last = 1, 0, 0
    for place in range(len(tokens)):
        token = tokens[place]
        count_newest(states, last, place - 1, place > 0 and document[place - 1])
        newest, used = used, used + 1
        states[0, newest], states[1, newest], states[2, newest] = states[0, last] + 1, 0, 0
        states[5, last], states[6, last] = token, newest
        state, last, result = states[1, last], newest, -1
        while state >= 0:
            if states[5, state] == token:
                result = states[6, state]
                break
            at = find(slots, edges, state, token)
            if slots[at] >= 0:
                result = edges[2, slots[at]]
                break
            instance = add(slots, head, tail, edges, at, instance, (state, token, newest))
            state = states[1, state]
        if result < 0:
            continue
        if states[0, result] != states[0, state] + 1:
            half, used = used, used + 1
            states[:, half] = states[:, result]
            states[0, half] = states[0, state] + 1
            edge = head[result]
            while edge >= 0:
                copied = (half, edges[1, edge], edges[2, edge])
                at = find(slots, edges, half, edges[1, edge])
                instance = add(slots, head, tail, edges, at, instance, copied)
                edge = edges[3, edge]
            states[1, result] = half
            redirect(states, slots, edges, state, token, result, half)
            result = half
        states[1, newest] = result
    return used, instance


@compiled
def spread(head: Ints, edges: Ints, listed: Ints) -> None:
    """Write the edges out state by state, each state's in the order in which they were made."""
    row = 0
    for state in range(len(head)):
        edge = head[state]
        while edge >= 0:
            listed[row, 0], listed[row, 1], listed[row, 2] = state, edges[1, edge], edges[2, edge]
            row += 1
            edge = edges[3, edge]
