from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.retrievers.indexes.continuations import Arrays, DraftOptions
from ragspec.retrievers.indexes.lookup import SegmentLookup
from ragspec.retrievers.indexes.segment import Segment, build_segment
from ragspec.retrievers.indexes.suffix_array import count_first_tokens, sort_suffixes
from tests.support.reference_lookup import ReferenceLookup

VOCAB = 4
Text = list[int]
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), max_size=8)
contexts = st.lists(st.integers(0, VOCAB - 1), max_size=20)
options = st.builds(
    DraftOptions,
    max_match=st.integers(1, 16),
    max_depth=st.integers(1, 8),
    rows=st.integers(1, 80),
    contexts=st.integers(1, 4),
    shorter=st.sampled_from([(), (1,), (3, 1), (6, 4, 3, 2, 1)]),
)


def arrays(texts: list[Text], wide: bool = False, vocab: int = VOCAB) -> Arrays:
    """The arrays of a segment, in memory and read-only as if mapped from a file."""
    flat = [vocab, *(token for text in texts for token in (*text, vocab))]
    tokens: Any = np.array(flat, dtype=np.uint32 if wide else np.uint16)
    buckets = count_first_tokens(tokens, vocab)
    suffixes = sort_suffixes(tokens, vocab, buckets=buckets)
    starts = np.cumsum([1, *(len(text) + 1 for text in texts)], dtype=np.int64)
    instance = Arrays(tokens, suffixes, buckets, starts)
    for array in instance:
        array.flags.writeable = False
    return instance


def assert_equal_answers(
    inputs: Arrays, context: Text, budget: int, depth: int, request: DraftOptions
) -> None:
    plain, fast = ReferenceLookup(inputs), SegmentLookup(inputs)
    tail = context[-request.max_match :]
    assert fast.longest_match(tail, request.max_match) == plain.longest_match(
        tail, request.max_match
    )
    expected = plain.draft(tail, budget, depth, request)
    got = fast.draft(tail, budget, depth, request)
    assert got.length == expected.length
    for name in ("tokens", "parents", "accept_prob", "counts", "depths", "origin"):
        a, b = getattr(got, name), getattr(expected, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)  # bit for bit, reach too


@settings(max_examples=1000)
@given(documents, contexts, st.integers(0, 40), options, st.booleans())
def test_compiled_and_plain_look_ups_agree_bit_for_bit(
    texts: list[Text], context: Text, budget: int, request: DraftOptions, wide: bool
) -> None:
    depth = min(5, request.max_depth)
    assert_equal_answers(arrays(texts, wide), context, budget, depth, request)


def test_they_agree_on_a_longer_text() -> None:
    rng = np.random.default_rng(0)
    vocab, phrases = 300, [np.minimum(rng.zipf(1.4, 12), 300) - 1 for _ in range(40)]
    texts = [
        np.concatenate([phrases[k] for k in rng.integers(0, 40, 30)]).tolist() for _ in range(60)
    ]
    inputs = arrays(texts, vocab=vocab)
    for _ in range(200):
        text = texts[int(rng.integers(60))]
        at = int(rng.integers(1, len(text)))
        context = [*text[max(0, at - 12) : at - 3], *text[at - 2 : at]]
        for budget in (4, 64):
            assert_equal_answers(inputs, context, budget, 16, DraftOptions(contexts=4))


@pytest.mark.parametrize("damaged", ["suffixes", "buckets", "starts"])
def test_damaged_files_give_a_useless_draft_not_a_crash(damaged: str) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, 30).tolist() for _ in range(10)]
    good = arrays(texts)
    for _ in range(100):
        changed = np.array(getattr(good, damaged))
        at = rng.integers(0, len(changed), 5)
        changed[at] = rng.integers(-(2**31), 2**31 - 1, 5)
        changed.flags.writeable = False
        fast = SegmentLookup(good._replace(**{damaged: changed}))
        draft = fast.draft(rng.integers(0, VOCAB, 6).tolist(), 16, 8, DraftOptions())
        assert len(draft.tokens) <= 16
        assert ((draft.tokens >= 0) & (draft.tokens < VOCAB)).all()


def test_an_open_segment_uses_them(tmp_path: Path) -> None:
    build_segment(tmp_path, [[0, 1, 2], [0, 1, 3]], VOCAB)
    segment = Segment.open(tmp_path)
    segment.warm_up()
    assert isinstance(segment.lookup, SegmentLookup)
    assert segment.draft([0, 1], 4).tokens.tolist() == [2, 3]
