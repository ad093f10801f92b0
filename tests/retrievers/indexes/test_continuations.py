"""The options of look-ups, and how they sample; see test_segment and test_kernels as well."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.indexes.continuations import Arrays, DraftOptions
from ragspec.retrievers.indexes.lookup import compiled
from ragspec.retrievers.indexes.segment import Segment, build_segment, segment_in_memory
from ragspec.retrievers.indexes.suffix_array import count_first_tokens, sort_suffixes
from tests.retrievers.indexes.test_segment import (
    VOCAB,
    Text,
    contexts,
    documents,
    ends,
    followers,
    longest,
    paths,
)
from tests.support.reference_lookup import ReferenceLookup


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"rows": 10**6},
        {"max_depth": -1},
        {"contexts": 0},
        {"shorter": (2, 2)},
        {"shorter": (3, 0)},
        {"followed": (2.0,)},
        {"followed_after_miss": ()},
    ],
)
def test_options_check_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        DraftOptions(**wrong)


def test_chances_multiply_along_the_path_and_the_last_entry_holds_on() -> None:
    options = DraftOptions(
        max_match=3, max_depth=3, followed=(0.0, 0.5, 0.75), followed_after_miss=(0.0, 0.25)
    )
    expected = np.array([0.5, 0.5 * 0.75, 0.5 * 0.75 * 0.75])
    np.testing.assert_allclose(options.chances[0, 1], expected)
    np.testing.assert_allclose(options.chances[1, 1], expected / 2)  # 0.25 at first, not 0.5
    np.testing.assert_allclose(options.chances[0, 3], 0.75 ** np.arange(1, 4))
    assert options.chances.shape == (2, 4, 3)


def test_nothing_to_fall_back_on_is_allowed() -> None:
    assert DraftOptions(shorter=()).lengths.tolist() == []


def naive_sample(
    texts: Sequence[Text], context: Text, length: int, request: DraftOptions
) -> dict[tuple[int, ...], float]:
    """Reach of each path behind the occurrences that a cap of rows leaves.

    Occurrences stand in the order of the text up to them; of the longest match, then of shorter
    suffixes without what a longer one had, every n-th is taken, so that all fit under the cap.
    """
    accept_prob: dict[tuple[int, ...], float] = defaultdict(float)
    borders = [VOCAB] * 32
    flat = [borders + [t for text in texts[:n] for t in (VOCAB, *text)] for n in range(len(texts))]
    taken, escape, before, width, used = 0, 1.0, 0, 0, 0
    for n in (length, *(each for each in request.shorter if each < length)) if length else ():
        places = ends(texts, context[-n:])
        if taken == request.rows or used == request.contexts or len(places) == width:
            continue
        past = {place: [*flat[place[0]], VOCAB, *texts[place[0]][: place[1]]] for place in places}
        places.sort(key=lambda place: (past[place][:-33:-1], place))
        width, stride = len(places), -(-len(places) // (request.rows - taken))
        chosen = [p for p in places[::stride] if past[p][-before:] != context[-before:] or not used]
        for number, at in chosen:
            chances = escape * request.chances[int(used > 0), n] / len(chosen)
            for path in followers(texts[number], at, request.max_depth):
                accept_prob[path] += chances[len(path) - 1]
        if chosen:
            escape *= 1.0 - request.chances[int(used > 0), n][0]
            taken, before, used = taken + len(chosen), n, used + 1
    return accept_prob


@settings(max_examples=800)
@given(documents, contexts, st.integers(1, 20), st.integers(1, 3))
def test_drafts_under_a_cap_of_rows_are_those_of_naive_sampling(
    texts: list[Text], context: Text, rows: int, most: int
) -> None:
    request = DraftOptions(max_match=4, max_depth=5, rows=rows, contexts=most)
    arrays = [np.array(text, dtype=np.int32) for text in texts]
    segment = segment_in_memory(arrays, VOCAB, 32)
    draft = segment.draft(context, 10_000, options=request)
    length = longest(texts, context, 4)
    accept_prob = naive_sample(texts, context, length, request)
    assert dict(zip(paths(draft), draft.accept_prob.tolist(), strict=True)) == pytest.approx(
        accept_prob
    )


def test_a_function_is_compiled_without_a_cache_where_none_can_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caches: list[bool] = []

    def njit(*, cache: bool = False, nogil: bool, error_model: str) -> object:
        caches.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return lambda function: ("compiled", function)

    def one() -> int:
        return 1

    monkeypatch.setitem(sys.modules, "numba", SimpleNamespace(njit=njit))
    kernel: Any = compiled(one)
    assert kernel == ("compiled", one)
    assert caches == [True, False]


LOOKUP_VOCAB = 4
LookupText = list[int]
lookup_documents = st.lists(st.lists(st.integers(0, LOOKUP_VOCAB - 1), max_size=40), max_size=8)
lookup_contexts = st.lists(st.integers(0, LOOKUP_VOCAB - 1), max_size=20)
options = st.builds(
    DraftOptions,
    max_match=st.integers(1, 16),
    max_depth=st.integers(1, 8),
    rows=st.integers(1, 80),
    contexts=st.integers(1, 4),
    shorter=st.sampled_from([(), (1,), (3, 1), (6, 4, 3, 2, 1)]),
)


def arrays(texts: list[LookupText], wide: bool = False, vocab: int = LOOKUP_VOCAB) -> Arrays:
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


def opened(inputs: Arrays) -> Segment:
    return Segment(inputs, 32)


def assert_equal_answers(
    inputs: Arrays, context: LookupText, budget: int, depth: int, request: DraftOptions
) -> None:
    plain, fast = ReferenceLookup(inputs), opened(inputs)
    tail = context[-request.max_match :]
    assert fast.longest_match(tail, request.max_match) == plain.longest_match(
        tail, request.max_match
    )
    expected = plain.draft(tail, budget, depth, request)
    got = fast.draft(tail, budget, max_depth=depth, options=request)
    assert got.length == expected.length
    for name in ("tokens", "parents", "accept_prob", "depths"):
        a, b = getattr(got, name), getattr(expected, name)
        assert a.dtype == b.dtype, name
        np.testing.assert_array_equal(a, b, err_msg=name)  # bit for bit, reach too


@settings(max_examples=1000)
@given(lookup_documents, lookup_contexts, st.integers(0, 40), options, st.booleans())
def test_compiled_and_plain_look_ups_agree_bit_for_bit(
    texts: list[LookupText], context: LookupText, budget: int, request: DraftOptions, wide: bool
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


@pytest.mark.parametrize("damaged", ["suffixes", "buckets"])
def test_damaged_files_give_a_useless_draft_not_a_crash(damaged: str) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, LOOKUP_VOCAB, 30).tolist() for _ in range(10)]
    good = arrays(texts)
    for _ in range(100):
        changed = np.array(getattr(good, damaged))
        at = rng.integers(0, len(changed), 5)
        changed[at] = rng.integers(-(2**31), 2**31 - 1, 5)
        changed.flags.writeable = False
        fast = opened(good._replace(**{damaged: changed}))
        draft = fast.draft(rng.integers(0, LOOKUP_VOCAB, 6).tolist(), 16, max_depth=8)
        assert len(draft.tokens) <= 16
        assert ((draft.tokens >= 0) & (draft.tokens < LOOKUP_VOCAB)).all()


def test_an_open_segment_uses_them(tmp_path: Path) -> None:
    segment = build_segment(tmp_path, [[0, 1, 2], [0, 1, 3]], LOOKUP_VOCAB)
    segment.warm_up()
    assert segment.draft([0, 1], 4).tokens.tolist() == [2, 3]
