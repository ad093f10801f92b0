"""The nearest keys are those of measuring all of them, whatever else is asked at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ragspec.retrievers.knn.neighbours import NearestKeys
from ragspec.retrievers.search import nearest


def clustered(count: int, width: int, seed: int = 0) -> Any:
    """Return keys around a few centres far from zero, some of them twice."""
    sample = np.random.default_rng(seed)
    centres = sample.normal(size=(7, width)) * 3.0 + 5.0
    keys = centres[sample.integers(7, size=count)] + sample.normal(size=(count, width))
    if count > 40:
        keys[count // 2 : count // 2 + 9] = keys[:9]
    return keys.astype(np.float16)


def measured(keys: Any, query: Any, k: int) -> tuple[list[int], Any]:
    rows = keys.astype(np.float64) - query.astype(np.float64)
    distances = (rows * rows).sum(axis=1)
    order = np.lexsort((np.arange(len(keys)), distances))[:k]
    return order.tolist(), distances[order]


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("k", [1, 7, 300])
def test_they_are_those_of_measuring_all(
    scanned: bool, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if scanned:
        pytest.importorskip("faiss")
    monkeypatch.setattr(nearest, "LARGE", 0 if scanned else 1 << 30)
    monkeypatch.setattr(nearest, "BLOCK", 256)
    keys = clustered(1100, 24)
    near = NearestKeys(keys)
    queries = clustered(64, 24, seed=3).astype(np.float32)
    queries[0], queries[1] = keys[3], keys[700]  # one that is there twice, one that is there
    alone = [near.search(query[None], k)[0] for query in queries]
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for size in (2, 5, 64):
            for one, many in zip(alone, near.search(queries[:size], k), strict=False):
                assert np.array_equal(one.numbers, many.numbers)
                assert np.array_equal(one.distances, many.distances)
    torch.set_num_threads(1)
    for query, result in zip(queries, alone, strict=True):
        numbers, distances = measured(keys, query, k)
        assert result.numbers.tolist() == numbers
        assert np.array_equal(result.distances, distances)


def test_a_smaller_k_is_the_beginning_of_a_larger_one() -> None:
    near, query = NearestKeys(clustered(400, 16)), clustered(1, 16, seed=8).astype(np.float32)
    most = near.search(query, 200)[0]
    for k in (1, 2, 30, 199):
        assert np.array_equal(near.search(query, k)[0].numbers, most.numbers[:k])


def test_more_than_there_are_gives_all() -> None:
    near = NearestKeys(clustered(5, 8))
    assert len(near.search(np.zeros((1, 8), np.float32), 50)[0].numbers) == 5
