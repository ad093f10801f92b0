from __future__ import annotations

import pytest

from ragspec.retrievers.indexes.context_index import (
    DocumentRange,
    QuotationStarts,
    sentence_ends,
)

STOP = 9
#          0  1  2     3     4  5  6     7  8     9  10
TOKENS = [50, 51, 1, 2, STOP, 3, 4, 5, STOP, 6, STOP, 52, 7, STOP, 8, STOP, 60]
RANGES = [DocumentRange(2, 11, 0, 0), DocumentRange(12, 16, 1, 0)]


def test_sentence_ends_are_what_most_documents_end_with() -> None:
    assert sentence_ends(TOKENS, RANGES) == {STOP}
    assert sentence_ends([1, 2, 3, 4, 5, 6], [DocumentRange(i, i + 1, 0, 0) for i in range(6)]) == (
        frozenset()
    )
    assert sentence_ends([], []) == frozenset()


def test_the_sentence_with_the_rarest_question_tokens_comes_first() -> None:
    ranked = QuotationStarts(TOKENS, RANGES, query=[4, 5, 70], ends=[STOP]).after(1)
    assert ranked[0][0] == 5
    assert {place for place, _ in ranked} == {2, 5, 9}
    assert sum(share for _, share in ranked) == pytest.approx(1.0)
    assert ranked[0][1] > ranked[1][1]


def test_only_the_document_after_the_label_is_offered() -> None:
    starts = QuotationStarts(TOKENS, RANGES, query=[4])
    assert {place for place, _ in starts.after(11)} == {12, 14}
    assert starts.after(12) == []


def test_a_far_label_introduces_nothing() -> None:
    tokens = [0] * 100 + [1, STOP]
    starts = QuotationStarts(tokens, [DocumentRange(100, 102, 0, 0)], query=[1])
    assert starts.after(50) == []
    assert starts.after(99) == [(100, 1.0)]


def test_a_document_without_question_tokens_is_ranked_by_place() -> None:
    ranked = QuotationStarts(TOKENS, RANGES, query=[], ends=[STOP]).after(1)
    assert [place for place, _ in ranked] == [2, 5, 9]
