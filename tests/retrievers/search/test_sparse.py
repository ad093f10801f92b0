from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.retrievers.search.sparse import SparseIndex, stem, words_of

TEXTS = [
    "The cats sleep in the house.",
    "A dictionary maps keys to values.",
    "Dictionaries can be merged with the update method.",
    "Größe und Straße.",
    "...",
]


def test_rare_shared_words_win_and_strangers_are_left_out() -> None:
    index = SparseIndex.build(TEXTS)
    result = index.search("How do I merge dictionaries by update?", 5)
    assert [number for number, _ in result] == [2, 1]
    assert result[0][1] > result[1][1] > 0
    assert index.search("quantum", 5) == []
    assert index.search("the of what", 5) == []
    assert [number for number, _ in index.search("Grosse grösse GRÖSSE", 1)] == []
    assert [number for number, _ in index.search("große GRÖßE", 1)] == [3]


def test_save_and_load_give_the_same_results(tmp_path: Path) -> None:
    index = SparseIndex.build(TEXTS)
    index.save(tmp_path / "s")
    again = SparseIndex.load(tmp_path / "s")
    for query in ("cats", "dictionary keys", "nothing here", "sleep update"):
        assert again.search(query, 3) == index.search(query, 3)


def test_texts_without_words_are_indexed_and_never_detected() -> None:
    index = SparseIndex.build(["...", "the of"])
    assert index.search("the", 2) == []


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("queries", "query"), ("cats", "cat"), ("class", "class"), ("status", "status"),
        ("is", "is"), ("trees", "tree"), ("movies", "movy"),
    ],
)  # fmt: skip
def test_plural_endings(word: str, expected: str) -> None:
    assert stem(word) == expected


@settings(max_examples=30)
@given(st.lists(st.text(alphabet="abc dé.", max_size=12), min_size=1, max_size=8), st.text())
def test_best_first_with_ties_by_number(texts: list[str], query: str) -> None:
    result = SparseIndex.build(texts).search(query, len(texts))
    assert result == sorted(result, key=lambda item: (-item[1], item[0]))
    selection = set(words_of(query))
    assert {number for number, _ in result} == {
        number for number, text in enumerate(texts) if selection & set(words_of(text))
    }
