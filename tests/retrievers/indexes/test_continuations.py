"""The options of look-ups, and look-ups compared with a naive search; see test_segment too."""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.indexes import segment
from ragspec.retrievers.indexes.lookup import compiled
from ragspec.retrievers.indexes.segment import (
    Arrays,
    DraftOptions,
    Match,
    Segment,
    segment_in_memory,
)
from tests.retrievers.indexes.test_suffix_array import naive


@pytest.mark.parametrize(
    ("name", "value"),
    [("rows", 0), ("rows", 10**6), ("max_depth", -1), ("contexts", 0), ("shorter", (2, 2))]
    + [("shorter", (3, 0))],
)
def test_options_out_of_range_are_refused(name: str, value: Any) -> None:
    with pytest.raises(InputError):
        DraftOptions(**{name: value})


def test_chances_multiply_along_the_path_and_the_last_entry_holds_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(segment, "FOLLOWED", (0.0, 0.5, 0.75))
    monkeypatch.setattr(segment, "FOLLOWED_AFTER_MISS", (0.0, 0.25))
    options = DraftOptions(max_match=3, max_depth=3)
    expected = np.array([0.5, 0.5 * 0.75, 0.5 * 0.75 * 0.75])
    np.testing.assert_allclose(options.chances[0, 1], expected)
    np.testing.assert_allclose(options.chances[1, 1], expected / 2)  # 0.25 at first, not 0.5
    np.testing.assert_allclose(options.chances[0, 3], 0.75 ** np.arange(1, 4))
    assert options.chances.shape == (2, 4, 3)


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


VOCAB = 4
Text = list[int]
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=40), max_size=8)
FOREIGN = [VOCAB, -1, 10**9]  # the separator, and ids outside the vocabulary: they never match
contexts = st.lists(st.sampled_from([*range(VOCAB)] * 3 + FOREIGN), max_size=20)
options = st.builds(
    DraftOptions,
    max_match=st.integers(1, 16),
    max_depth=st.integers(1, 8),
    rows=st.integers(1, 80),
    contexts=st.integers(1, 4),
    shorter=st.sampled_from([(), (1,), (3, 1), (6, 4, 3, 2, 1)]),
)


def arrays(texts: list[Text], wide: bool = False, vocab: int = VOCAB) -> Arrays:
    """The arrays of a segment in memory, the tokens in four bytes if wide."""
    segment = segment_in_memory([np.array(text, np.int64) for text in texts], vocab, 32)
    tokens = segment.tokens.astype(np.uint32 if wide else np.uint16)
    tokens.flags.writeable = False
    return Arrays(tokens, segment.suffixes, segment.buckets, segment.starts)


class NaiveLookup:
    """Look-ups that compare every position of the text."""

    def __init__(self, arrays: Arrays) -> None:
        self.text: Text = arrays.tokens.tolist()
        self.separator = len(arrays.buckets) - 1
        self.order = naive(arrays.tokens, self.separator, 32)
        self.by_token: dict[int, list[int]] = defaultdict(list)
        for number, place in enumerate(self.order):
            self.by_token[self.text[place]].append(number)

    def numbers(self, phrase: Text) -> list[int]:
        """Return the numbers, in the sorted order, of the places at which a phrase ends."""
        n, known = len(phrase), self.by_token.get(phrase[-1], ())
        if self.separator in phrase:
            return []
        return [number for number in known if self.past(self.order[number], n) == phrase]

    def longest_match(self, context: Text, most: int) -> Match:
        for n in range(min(most, len(context)), 0, -1):
            if numbers := self.numbers(context[-n:]):
                return Match(n, numbers[0], numbers[-1] + 1)
        return Match(0, 0, 0)

    def draft(
        self, context: Text, length: int, depth: int, request: DraftOptions
    ) -> list[tuple[tuple[int, ...], float]]:
        """Return all paths with their probabilities, best first, then short before long.

        Occurrences count in the order of the text up to them: those of the longest match, then of
        shorter suffixes without what a longer one had. Every n-th is taken, so that all fit under
        the cap of rows.
        """
        accept_prob: dict[tuple[int, ...], float] = defaultdict(float)
        taken, escape, before, width, used = 0, 1.0, 0, 0, 0
        for n in (length, *(each for each in request.shorter if each < length)) if length else ():
            places = [self.order[number] for number in self.numbers(context[-n:])]
            if taken == request.rows or used == request.contexts or len(places) == width:
                continue
            width, stride = len(places), -(-len(places) // (request.rows - taken))
            longer = context[len(context) - before :]
            chosen = [p for p in places[::stride] if not used or self.past(p, before) != longer]
            if not chosen:
                continue
            chances = request.chances[int(used > 0), n]
            for path, count in Counter(q for p in chosen for q in self.after(p, depth)).items():
                accept_prob[path] += (escape * chances / len(chosen))[len(path) - 1] * count
            escape *= 1.0 - chances[0]
            taken, before, used = taken + len(chosen), n, used + 1
        return sorted(accept_prob.items(), key=lambda each: (-each[1], len(each[0]), each[0]))

    def past(self, place: int, n: int) -> Text:
        return self.text[max(0, place + 1 - n) : place + 1]

    def after(self, place: int, depth: int) -> list[tuple[int, ...]]:
        """Return every path of up to `depth` tokens that follows a place in its document."""
        end = self.text.index(self.separator, place)
        following = self.text[place + 1 : min(end, place + 1 + depth)]
        return [tuple(following[:n]) for n in range(1, len(following) + 1)]


def assert_equal_answers(
    inputs: Arrays,
    plain: NaiveLookup,
    context: Text,
    budgets: Sequence[int],
    depth: int,
    request: DraftOptions,
) -> None:
    """Assert that look-ups equal naive ones, with bit-equal probabilities."""
    fast, most = Segment(inputs, 32), request.max_match
    tail = context[-most:]
    match = plain.longest_match(tail, most)
    assert fast.longest_match(tail, most) == match
    whole = plain.draft(tail, match.length, depth, request)
    for budget in budgets:
        draft, best = fast.draft(tail, budget, max_depth=depth, options=request), whole[:budget]
        numbers = {path: number for number, (path, _) in enumerate(best)}
        assert draft.length == match.length
        assert draft.tokens.tolist() == [path[-1] for path in numbers]
        assert draft.parents.tolist() == [numbers.get(path[:-1], -1) for path in numbers]
        assert draft.accept_prob.tolist() == [accept_prob for _, accept_prob in best]
        columns = draft.tokens, draft.parents, draft.accept_prob
        assert [each.dtype for each in columns] == [np.int64] * 2 + [np.float64]


@settings(max_examples=1800)
@given(documents, contexts, st.integers(0, 40), options, st.booleans())
def test_look_ups_are_those_of_a_naive_search_bit_for_bit(
    texts: list[Text], context: Text, budget: int, request: DraftOptions, wide: bool
) -> None:
    inputs, depth = arrays(texts, wide), min(5, request.max_depth)
    assert_equal_answers(inputs, NaiveLookup(inputs), context, [budget], depth, request)


def test_look_ups_equal_a_naive_search_on_a_longer_text() -> None:
    rng = np.random.default_rng(0)
    vocab, phrases = 300, [np.minimum(rng.zipf(1.4, 12), 300) - 1 for _ in range(40)]
    texts = [
        np.concatenate([phrases[k] for k in rng.integers(0, 40, 30)]).tolist() for _ in range(60)
    ]
    inputs = arrays(texts, vocab=vocab)
    plain = NaiveLookup(inputs)
    for _ in range(200):
        text = texts[int(rng.integers(60))]
        at = int(rng.integers(1, len(text)))
        context = [*text[max(0, at - 12) : at - 3], *text[at - 2 : at]]
        assert_equal_answers(inputs, plain, context, (4, 64), 16, DraftOptions(contexts=4))


@pytest.mark.parametrize("damaged", ["suffixes", "buckets"])
def test_damaged_files_give_a_useless_draft_not_a_crash(damaged: str) -> None:
    rng = np.random.default_rng(3)
    texts = [rng.integers(0, VOCAB, 30).tolist() for _ in range(10)]
    good = arrays(texts)
    for _ in range(100):
        changed = np.array(getattr(good, damaged))
        at = rng.integers(0, len(changed), 5)
        changed[at] = rng.integers(-(2**31), 2**31 - 1, 5)
        changed.flags.writeable = False
        fast = Segment(good._replace(**{damaged: changed}), 32)
        draft = fast.draft(rng.integers(0, VOCAB, 6).tolist(), 16, max_depth=8)
        assert len(draft.tokens) <= 16
        assert ((draft.tokens >= 0) & (draft.tokens < VOCAB)).all()
