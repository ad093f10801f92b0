"""Whether documents speak of a question: by its words and their rarity, or by the nearest text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.sparse import (
    LEAST_COSINE,
    LEAST_COVERAGE,
    SparseIndex,
    Support,
    words_of,
)
from tests.support.toy_embedder import make_embedder

TEXTS = ["The cat sleeps.", "The cat eats fish.", "A cat and a dog.", "Trains have wheels."]


def rarity(word: str) -> float:
    have = sum(word in words_of(text) for text in TEXTS)
    return math.log(1 + (len(TEXTS) - have + 0.5) / (have + 0.5))


def test_coverage_is_the_share_of_words_by_rarity_in_the_best_text() -> None:
    index = SparseIndex.build(TEXTS)
    whole = rarity("cat") + rarity("wheel") + rarity("moon")
    assert rarity("moon") > rarity("wheel") > rarity("cat")
    result = index.coverage("The cat, the wheels, the moon?", TEXTS)
    assert result == pytest.approx(rarity("wheel") / whole)
    assert index.coverage("cat wheels moon", TEXTS[:2]) == pytest.approx(rarity("cat") / whole)
    assert index.coverage("cat", TEXTS) == 1.0
    assert index.coverage("moon", TEXTS) == 0.0
    assert index.coverage("moon", []) == 0.0
    assert index.coverage("What is it?", TEXTS) == 1.0, "nothing was asked that could be missing"


@pytest.mark.parametrize(
    ("coverage", "cosine", "result"),
    [
        (LEAST_COVERAGE, 0.0, True),
        (LEAST_COVERAGE - 0.01, LEAST_COSINE, True),
        (LEAST_COVERAGE - 0.01, LEAST_COSINE - 0.01, False),
        (LEAST_COVERAGE - 0.01, None, False),
        (None, 0.0, True),
    ],
)
def test_one_of_two_measures_is_enough(
    coverage: float | None, cosine: float | None, result: bool
) -> None:
    assert Support(coverage, cosine).covered is result


def test_an_index_tells_what_its_best_passages_have(tmp_path: Path) -> None:
    documents = [Document(f"{n}.txt", f"{n}", text) for n, text in enumerate(TEXTS)]
    words = PassageIndex.build(documents, embedder=None)
    assert words.support("cat moon").cosine is None
    assert words.support("cat").coverage == 1.0
    embedder = make_embedder(tmp_path / "toy")
    dense = PassageIndex.build(documents, embedder=embedder, sparse=False)
    assert dense.support("cat moon").coverage is None
    assert dense.support("cat moon").covered
    both = PassageIndex.build(documents, embedder=embedder).support("moon")
    assert both.coverage == 0.0 and both.cosine is not None
