"""Exact and approximate search among vectors: a result depends on the query alone."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.errors import MissingExtraError, StoreError
from ragspec.retrievers.search import nearest
from ragspec.retrievers.search.dense import DenseIndex, Embedder
from ragspec.retrievers.search.nearest import Approximate, Exact, Floats, Nearest, build_nearest

WIDTH = 24


def unit(count: int, seed: int, spread: float = 1.0) -> Floats:
    """Return unit vectors around one centre by a spread; a tenth of them occurs twice."""
    sample = np.random.default_rng(seed)
    vectors = sample.normal(size=WIDTH) + spread * sample.normal(size=(count, WIDTH))
    vectors[: count // 10] = vectors[-(count // 10) or count :][: count // 10]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors.astype(np.float32)


def index(vectors: Floats, result: Nearest | None = None) -> DenseIndex:
    embedder: Any = None
    embedding: Embedder = embedder
    return DenseIndex(vectors, embedding, result)


def numbers(instance: DenseIndex, query: Floats, k: int) -> list[int]:
    """Return the passages of a search for one vector."""
    return [number for number, _ in instance.search_vectors(query[None], k)[0]]


def truth(vectors: Floats, query: Floats, k: int) -> list[int]:
    """Return the k best by float64 products over all, of equal ones the earlier."""
    scores = (vectors.astype(np.float64) * query.astype(np.float64)).sum(axis=1)
    return [int(number) for number in np.lexsort((np.arange(len(vectors)), -scores))[:k]]


@pytest.fixture(params=["float32", "8 bits"])
def precision(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compute scores in float32, or scan in 8 bits by faiss."""
    if request.param == "8 bits":
        pytest.importorskip("faiss")
        monkeypatch.setattr(nearest, "LARGE", 1)
        monkeypatch.setattr(nearest, "SCANNED", 64)
        monkeypatch.setattr(nearest, "FEW", 5)
    monkeypatch.setattr(nearest, "BLOCK", 700)
    return str(request.param)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("spread", [1.0, 0.05, 0.001])
@pytest.mark.parametrize("count", [1, 9, 500, 3000])
def test_exact_search_equals_float64_for_every_k_and_batch(count: int, spread: float) -> None:
    vectors, queries = unit(count, 1, spread), unit(64, 2, spread)
    instance = index(vectors)
    for k in (1, 7, 20, count, count + 5):
        alone = [instance.search_vectors(query[None], k)[0] for query in queries]
        right = [truth(vectors, query, k) for query in queries]
        assert [[n for n, _ in result] for result in alone] == right
        for batch in (2, 5, 64):
            assert instance.search_vectors(queries[:batch], k) == alone[:batch]
        assert alone == [result[:k] for result in instance.search_vectors(queries, k + 3)]


@pytest.mark.usefixtures("precision")
def test_results_are_independent_of_threads() -> None:
    vectors, queries = unit(2500, 3, 0.05), unit(8, 4, 0.05)
    result = index(vectors).search_vectors(queries, 10)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert index(vectors).search_vectors(queries, 10) == result
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize("length", [0.0, 1e-3, 50.0])
def test_vectors_of_any_length_are_searched(length: float) -> None:
    sample = np.random.default_rng(7)
    vectors = (length * sample.normal(size=(900, WIDTH))).astype(np.float32)
    query = sample.normal(size=WIDTH).astype(np.float32)
    assert numbers(index(vectors), query, 12) == truth(vectors, query, 12)


@pytest.mark.parametrize("bounded", [True, False])
def test_scan_is_exact_only_with_its_error_bound(bounded: bool, precision: str) -> None:
    if precision == "float32":
        pytest.skip("of the scan alone")
    vectors, queries = unit(3000, 1, 0.05), unit(64, 2, 0.05)
    exact = Exact(vectors)
    assert exact.scan is not None
    if not bounded:
        exact.scan.error = 0.0
    dense = index(vectors, exact)
    results = [numbers(dense, query, 7) for query in queries]
    assert (results == [truth(vectors, query, 7) for query in queries]) is bounded


@pytest.mark.parametrize(("clusters", "scanned"), [(0, 64), (200, 60), (20, 40)])
def test_large_collections_are_searched_exactly(clusters: int, scanned: int) -> None:
    """Scans answer most queries; the product answers those with too many near-ties."""
    pytest.importorskip("faiss")
    rng, count = np.random.default_rng(4), nearest.LARGE + 100
    vectors = rng.normal(size=(count + 64, 64))
    if clusters:
        centres = 4.0 * rng.normal(size=(clusters, 64))
        vectors += centres[rng.integers(clusters, size=len(vectors))]
    vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)
    vectors, queries = vectors[:-64], vectors[-64:]
    exact = Exact(vectors)
    assert exact.scan is not None
    assert sum(result is not None for result in exact.scan.candidates(queries, 5)) >= scanned
    dense = index(vectors, exact)
    assert all(numbers(dense, query, 5) == truth(vectors, query, 5) for query in queries)


def test_without_faiss_large_collections_are_searched_by_the_product(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    monkeypatch.setattr(nearest, "LARGE", 1)
    vectors, (query,) = unit(500, 1), unit(1, 2)
    exact = Exact(vectors)
    assert numbers(index(vectors, exact), query, 5) == truth(vectors, query, 5)
    assert exact.scan is None


def test_candidates_are_few() -> None:
    candidates = Exact(unit(20_000, 5)).candidates(unit(4, 6), 10)
    assert all(10 <= len(each) < 2000 for each in candidates)


def test_approximate_index_has_enough_recall_for_every_k_and_batch() -> None:
    pytest.importorskip("faiss")
    vectors, queries = unit(4000, 1), unit(40, 2)
    instance = index(vectors, build_nearest(vectors, "hnsw"))
    alone = [instance.search_vectors(query[None], 10)[0] for query in queries]
    assert instance.search_vectors(queries, 10) == alone
    assert [result[:1] for result in alone] == instance.search_vectors(queries, 1)
    right = [truth(vectors, query, 10) for query in queries]
    hit = [len({n for n, _ in a} & set(b)) for a, b in zip(alone, right, strict=True)]
    assert sum(hit) > 0.6 * 10 * len(queries)
    for count in (1, 3, 40):
        few = vectors[:count]
        (first, *_), *_ = index(few, build_nearest(few, "hnsw")).search_vectors(few[:1], 2)
        assert first[1] == pytest.approx(1.0)
    copies = np.concatenate([np.repeat(vectors[:1], 3000, axis=0), queries])
    instance = index(copies, build_nearest(copies, "hnsw"))
    assert numbers(instance, queries[0], 20) == truth(copies, queries[0], 20)


def test_saved_index_gives_equal_results_and_others_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("faiss")
    vectors, queries = unit(600, 1), unit(8, 2)
    instance = build_nearest(vectors, "hnsw")
    assert isinstance(instance, Approximate)
    instance.save(tmp_path / "n")
    again = index(vectors, Approximate.load(tmp_path / "n", vectors))
    expected = index(vectors, instance).search_vectors(queries, 5)
    assert again.search_vectors(queries, 5) == expected
    with pytest.raises(StoreError, match="540 vectors of 24 dimensions, expected 500 of 24"):
        Approximate.load(tmp_path / "n", vectors[:500])
    (tmp_path / "n").write_bytes(b"nothing of faiss's")
    with pytest.raises(StoreError, match="cannot be read by faiss"):
        Approximate.load(tmp_path / "n", vectors)


def test_a_missing_faiss_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "faiss", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'ragspec\[rag\]'"):
        build_nearest(unit(5, 1), "hnsw")
