from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passages import WORD, split_document, split_documents, weight

TEXTS = st.lists(
    st.sampled_from(
        ["word", "End.", "Why?", "\n", "\n\n", "  ", "x" * 50, "Next", "日本語。", '"A."']
    )
    | st.text(max_size=6),
    max_size=200,
).map(" ".join)


def document(text: str, headings: tuple[tuple[int, str], ...] = ()) -> Document:
    return Document("d", "Title", text, headings=headings)


@given(TEXTS, st.integers(10, 40))
def test_passages_are_chunks_that_cover_every_word_in_order(text: str, words: int) -> None:
    passages = split_document(document(text), 3, words)
    end = 0
    for passage in passages:
        assert passage.document == 3
        assert passage.text == text[passage.start : passage.end]
        assert passage.text == passage.text.strip() != ""
        assert text[end : passage.start].strip() == ""
        assert weight(text, (passage.start, passage.end)) <= words + words // 10 + 2
        end = passage.end
    assert text[end:].strip() == ""


def test_sentences_stay_whole_and_passages_near_the_size() -> None:
    sentence = "This sentence has exactly eight words in it."
    passages = split_document(document(" ".join([sentence] * 100)), words=100)
    assert all(passage.text.endswith("it.") for passage in passages)
    sizes = [len(WORD.findall(passage.text)) for passage in passages]
    assert all(size == 96 for size in sizes[:-1])


def test_heading_begins_a_passage_and_names_it() -> None:
    first = "Words of the first part go on here. " * 10
    text = f"{first}\n\nSecond\n\nThe second part is short."
    passages = split_document(document(text, ((first.__len__() + 2, "Second"),)), words=105)
    assert [passage.title for passage in passages] == ["Title", "Second"]
    assert passages[1].text.startswith("Second\n\nThe second")


def test_a_long_line_is_cut_between_words_and_a_long_word_inside() -> None:
    passages = split_document(document("word " * 95), words=20)
    assert [len(passage.text.split()) for passage in passages] == [20, 20, 20, 20, 15]
    assert len(split_document(document("x" * 5000), words=20)) > 10


def test_documents_are_numbered_and_tiny_passages_refused() -> None:
    both = split_documents([document("One."), document("Two.")])
    assert [(passage.document, passage.text) for passage in both] == [(0, "One."), (1, "Two.")]
    with pytest.raises(InputError, match="10 or more"):
        split_document(document("One."), words=5)
