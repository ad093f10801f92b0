"""A heap of draft nodes in flat arrays, compiled with numba where that can be imported.

Nodes are candidates by number: reach f64 [C] and nodes i32 [C, 2 or more] (level, first row, ...).
numba looks for changes only in the file of a function: touch `continuations_numba` after a change
here.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ragspec.errors import MissingExtraError

Function = TypeVar("Function", bound=Callable[..., Any])
Floats = NDArray[np.float64]
Table = NDArray[np.int32]


def load_numba() -> Any:
    """Return the module numba; raises MissingExtraError with the reason where it cannot be had."""
    try:
        return import_module("numba")
    except Exception as error:  # one that is installed and broken raises many kinds
        if isinstance(error, ModuleNotFoundError) and error.name == "numba":
            reason = "numba is not installed"
        else:
            reason = f"numba is installed but cannot be imported ({error})"
        raise MissingExtraError(
            f"{reason}; reinstall numba: pip install --force-reinstall numba"
        ) from error


def compiled(function: Function) -> Function:
    """Return the function as numba compiles it when first called; as it is without."""
    try:
        numba = load_numba()
    except MissingExtraError:
        return function
    try:
        made = numba.njit(cache=True, nogil=True, error_model="numpy")(function)
    except RuntimeError:  # no folder to cache in may be written: compile in every process
        made = numba.njit(nogil=True, error_model="numpy")(function)
    return cast("Function", made)


@compiled
def goes_first(a: int, b: int, reach: Floats, nodes: Table) -> bool:
    """Say whether candidate a is better than b: larger reach, then shallower, then earlier row."""
    if reach[a] != reach[b]:
        return bool(reach[a] > reach[b])
    if nodes[a, 0] != nodes[b, 0]:
        return bool(nodes[a, 0] < nodes[b, 0])
    return bool(nodes[a, 1] < nodes[b, 1])


@compiled
def push(heap: Table, size: int, candidate: int, reach: Floats, nodes: Table) -> None:
    """Add a candidate to a heap of `size` candidates, the best on top."""
    at = size
    while at > 0:
        above = (at - 1) >> 1
        if not goes_first(candidate, heap[above], reach, nodes):
            break
        heap[at] = heap[above]
        at = above
    heap[at] = candidate


@compiled
def pop(heap: Table, size: int, reach: Floats, nodes: Table) -> int:
    """Take the best candidate from a heap of `size`, which shrinks by one."""
    best, last, at = heap[0], heap[size - 1], 0
    size -= 1
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and goes_first(heap[child + 1], heap[child], reach, nodes):
            child += 1
        if not goes_first(heap[child], last, reach, nodes):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = last
    return int(best)
