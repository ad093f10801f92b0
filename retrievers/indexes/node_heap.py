"""A heap of draft nodes in flat arrays, compiled with numba.

Nodes are candidates by number: reach f64 [C] and nodes i32 [C, 2 or more] (level, first row, ...).
numba looks for changes only in the file of a function: touch `lookup` after a change
here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Table = NDArray[np.int32]


def compiled(function: Function) -> Function:
    """Return the function as numba compiles it at its first call, cached on disk if possible."""
    import numba

    try:
        kernel = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder for the cache is writable: compile in every process
        kernel = numba.njit(nogil=True, error_model="numpy")(function)
    return cast("Function", kernel)


@compiled
def goes_first(a: int, b: int, accept_prob: Floats, nodes: Table) -> bool:
    """Say whether candidate a is better than b: larger reach, then shallower, then earlier row."""
    if accept_prob[a] != accept_prob[b]:
        return bool(accept_prob[a] > accept_prob[b])
    if nodes[a, 0] != nodes[b, 0]:
        return bool(nodes[a, 0] < nodes[b, 0])
    return bool(nodes[a, 1] < nodes[b, 1])


@compiled
def push(heap: Table, size: int, candidate: int, accept_prob: Floats, nodes: Table) -> None:
    """Add a candidate to a heap of `size` candidates, the best on top."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not goes_first(candidate, heap[above], accept_prob, nodes):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = candidate


@compiled
def pop(heap: Table, size: int, accept_prob: Floats, nodes: Table) -> int:
    """Take the best candidate from a heap of `size`, which shrinks by one."""
    best, last, at = heap[0], heap[size - 1], 0
    size -= 1
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and goes_first(heap[child + 1], heap[child], accept_prob, nodes):
            child += 1
        if not goes_first(heap[child], last, accept_prob, nodes):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return int(best)
