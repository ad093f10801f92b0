import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.retrievers.indexes import suffix_array
from ragspec.retrievers.indexes.context_index import DocumentRange, QuotationStarts, sentence_ends
from ragspec.retrievers.indexes.suffix_array import Tokens, sort_suffixes

VOCAB = 3
texts = st.lists(st.integers(0, VOCAB), max_size=60)


def encode(text: list[int], wide: bool = False, separator: int = VOCAB) -> Tokens:
    tokens = np.array([separator, *text, separator])
    return tokens.astype(np.uint32) if wide else tokens.astype(np.uint16)


def naive(tokens: Tokens, separator: int, depth: int) -> list[int]:
    """Return all positions but separators, sorted by the reversed text before, then by place."""
    text = tokens.tolist()

    def key(at: int) -> tuple[list[int], int]:
        return [text[at - k] if at >= k else separator for k in range(depth)], at

    return sorted((at for at, token in enumerate(text) if token != separator), key=key)


@settings(max_examples=400)
@given(texts, st.booleans(), st.integers(1, 12), st.integers(1, 40), st.integers(1, 30))
def test_the_order_is_that_of_a_naive_sort_for_any_run_and_block(
    text: list[int], wide: bool, depth: int, run: int, block: int
) -> None:
    tokens = encode(text, wide)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(suffix_array, "_RUN", run)
        patch.setattr(suffix_array, "_BLOCK", block)
        assert sort_suffixes(tokens, VOCAB, depth)[0].tolist() == naive(tokens, VOCAB, depth)


def test_large_vocabularies_are_sorted_by_all_their_bits() -> None:
    ids = np.random.default_rng(1).choice([1, 65_536, 65_537, 69_999], 500)
    tokens = encode(ids.tolist(), True, 70_000)
    assert sort_suffixes(tokens, 70_000, 32)[0].tolist() == naive(tokens, 70_000, 32)


def test_sorting_needs_at_most_24_bytes_a_token() -> None:
    """Allocate the result, one run and one block only."""
    rng = np.random.default_rng(0)
    separator = 1000
    tokens = rng.integers(0, separator, 2_000_000).astype(np.uint16)
    tokens[0] = tokens[-1] = separator
    tracemalloc.start()
    sort_suffixes(tokens, separator, 32)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 * len(tokens)


STOP = 9
#          0  1  2     3     4  5  6     7  8     9  10
TOKENS = [50, 51, 1, 2, STOP, 3, 4, 5, STOP, 6, STOP, 52, 7, STOP, 8, STOP, 60]
RANGES = [DocumentRange(2, 11, 0, 0), DocumentRange(12, 16, 1, 0)]


def test_sentence_ends_are_the_last_tokens_of_most_documents() -> None:
    assert sentence_ends(TOKENS, RANGES) == {STOP}
    single = [DocumentRange(i, i + 1, 0, 0) for i in range(6)]
    assert sentence_ends([1, 2, 3, 4, 5, 6], single) == sentence_ends([], []) == frozenset()


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


def test_a_distant_label_offers_no_sentence() -> None:
    tokens = [0] * 100 + [1, STOP]
    starts = QuotationStarts(tokens, [DocumentRange(100, 102, 0, 0)], query=[1])
    assert starts.after(50) == []
    assert starts.after(99) == [(100, 1.0)]


def test_a_document_without_question_tokens_is_ranked_by_place() -> None:
    ranked = QuotationStarts(TOKENS, RANGES, query=[], ends=[STOP]).after(1)
    assert [place for place, _ in ranked] == [2, 5, 9]
