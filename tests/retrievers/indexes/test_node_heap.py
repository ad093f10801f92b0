from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.retrievers.indexes.continuations import compiled, pop, push

candidates = st.lists(
    st.tuples(st.sampled_from([0.1, 0.5, 0.9]), st.integers(0, 2), st.integers(0, 99)),
    unique_by=lambda candidate: candidate[1:],
    max_size=30,
)


@given(candidates)
def test_the_largest_accept_prob_comes_first_then_the_shallowest_then_the_first_row(
    inputs: list[tuple[float, int, int]],
) -> None:
    accept_prob = np.array([r for r, _, _ in inputs])
    nodes = np.array([[level, row] for _, level, row in inputs], dtype=np.int32).reshape(-1, 2)
    heap = np.empty(len(inputs), dtype=np.int32)
    for candidate in range(len(inputs)):
        push(heap, candidate, candidate, accept_prob, nodes)
    order = [int(pop(heap, size, accept_prob, nodes)) for size in range(len(inputs), 0, -1)]
    assert [inputs[c] for c in order] == sorted(inputs, key=lambda c: (-c[0], c[1], c[2]))


def test_a_function_is_compiled_without_a_cache_where_none_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches: list[bool] = []

    def njit(*, cache: bool = False, nogil: bool, error_model: str) -> object:
        caches.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    def one() -> int:
        return 1

    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(njit=njit))
    kernel: Any = compiled(one)
    assert kernel == ("compiled", one)
    assert caches == [True, False]
