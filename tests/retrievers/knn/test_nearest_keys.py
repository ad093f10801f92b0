"""The nearest keys are those of measuring all of them, whatever else is asked at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ragspec.models.packed import available, halves
from ragspec.retrievers.knn import nearest_keys
from ragspec.retrievers.knn.nearest_keys import NearestKeys


def clustered(count: int, width: int, seed: int = 0) -> Any:
    """Return keys around a few centres far from zero, some of them twice."""
    drawn = np.random.default_rng(seed)
    centres = drawn.normal(size=(7, width)) * 3.0 + 5.0
    keys = centres[drawn.integers(7, size=count)] + drawn.normal(size=(count, width))
    if count > 40:
        keys[count // 2 : count // 2 + 9] = keys[:9]
    return keys.astype(np.float16)


def measured(keys: Any, query: Any, k: int) -> tuple[list[int], Any]:
    rows = keys.astype(np.float64) - query.astype(np.float64)
    distances = (rows * rows).sum(axis=1)
    order = np.lexsort((np.arange(len(keys)), distances))[:k]
    return order.tolist(), distances[order]


@pytest.mark.parametrize("halved", [False, True])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_they_are_those_of_measuring_all(
    halved: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if halved and not (available() and halves()):
        pytest.skip("this CPU has no fast products in bfloat16")
    monkeypatch.setattr(nearest_keys, "LEAST_HALVES", 0 if halved else 1 << 30)
    monkeypatch.setattr(nearest_keys, "BLOCK", 256)
    keys = clustered(1100, 24)
    near = NearestKeys(keys)
    queries = clustered(64, 24, seed=3).astype(np.float32)
    queries[0], queries[1] = keys[3], keys[700]  # one that is there twice, one that is there
    alone = [near.search(query[None], k)[0] for query in queries]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (2, 5, 64):
            together = near.search(queries[:size], k)
            for one, many in zip(alone, together, strict=False):
                assert np.array_equal(one.numbers, many.numbers)
                assert np.array_equal(one.distances, many.distances)
    torch.set_num_threads(1)
    for query, found in zip(queries, alone, strict=True):
        numbers, distances = measured(keys, query, k)
        assert found.numbers.tolist() == numbers
        assert np.array_equal(found.distances, distances)


def test_a_smaller_k_is_the_beginning_of_a_larger_one() -> None:
    near, query = NearestKeys(clustered(400, 16)), clustered(1, 16, seed=8).astype(np.float32)
    most = near.search(query, 200)[0]
    for k in (1, 2, 30, 199):
        found = near.search(query, k)[0]
        assert np.array_equal(found.numbers, most.numbers[:k])


def test_more_than_there_are_gives_all() -> None:
    near = NearestKeys(clustered(5, 8))
    assert len(near.search(np.zeros((1, 8), np.float32), 50)[0].numbers) == 5


def test_without_memory_for_a_copy_the_keys_are_read_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, query = clustered(300, 16), clustered(2, 16, seed=5).astype(np.float32)
    whole = NearestKeys(keys).search(query, 20)
    monkeypatch.setattr(nearest_keys, "free_memory", lambda: 0)
    poor = NearestKeys(keys)
    found = poor.search(query, 20)
    assert not poor._blocks
    for one, other in zip(whole, found, strict=True):
        assert np.array_equal(one.numbers, other.numbers)
