from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.search.fusion import FunctionRetriever, Fusion, as_retriever, fuse_rankings


def test_fusion_is_the_formula() -> None:
    fused = fuse_rankings({"dense": [(7, 0.9), (3, 0.8)], "sparse": [(3, 12.0)]})
    assert [(number, ranks) for number, _, ranks in fused] == [
        (3, {"dense": 2, "sparse": 1}),
        (7, {"dense": 1}),
    ]
    assert fused[0][1] == pytest.approx(1 / 62 + 1 / 61)
    weighted = fuse_rankings({"dense": [(7, 0.9)], "sparse": [(3, 1.0)]}, Fusion(k=2, sparse=0.5))
    assert weighted[1][1] == pytest.approx(0.5 / 3)
    with pytest.raises(InputError, match="0 or more"):
        Fusion(dense=-1)


@given(st.lists(st.integers(0, 9), unique=True), st.lists(st.integers(0, 9), unique=True))
def test_fusion_keeps_the_union_best_first(first: list[int], second: list[int]) -> None:
    fused = fuse_rankings(
        {"dense": [(n, 0.0) for n in first], "sparse": [(n, 0.0) for n in second]}
    )
    assert {number for number, _, _ in fused} == {*first, *second}
    scores = [score for _, score, _ in fused]
    assert scores == sorted(scores, reverse=True)
    if first and first == second:
        assert [number for number, _, _ in fused] == first


def test_bare_function_becomes_a_retriever() -> None:
    def search(query: str) -> list[tuple[str, float, Mapping[str, Any]]]:
        return [(f"about {query}", 2.0, {"source": "a.txt", "title": "A"}), ("more", 1.0, {})]

    hits = as_retriever(search).search("cats", 5)
    assert [(hit.document.name, hit.passage.title) for hit in hits] == [
        ("a.txt", "A"),
        ("result 2", "result 2"),
    ]
    assert hits[0].passage.text == hits[0].document.text == "about cats"
    assert len(as_retriever(search).search("cats", 1)) == 1


@pytest.mark.parametrize("result", ["text", ("text", 1.0), ("text", "x", {}), (1, 1.0, {}), None])
def test_wrong_results_are_refused(result: Any) -> None:
    with pytest.raises(InputError, match="search function returned"):
        FunctionRetriever(lambda query: [result]).search("q", 1)


def test_what_cannot_search_is_refused() -> None:
    with pytest.raises(InputError, match="Got a int as the retriever"):
        as_retriever(3)  # type: ignore[arg-type]
