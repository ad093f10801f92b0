from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from ragspec.retrievers.indexes.suffix_automaton import ROOT_STATE, SuffixAutomaton

VOCAB = 4
Text = list[int]
texts = st.lists(st.integers(0, VOCAB - 1), max_size=24)


def make(parts: Sequence[Text], grown: Text, cited: bool = False) -> SuffixAutomaton:
    """Return an automaton of separated texts, whose last one grows by some tokens."""
    automaton = SuffixAutomaton(VOCAB)
    for text in parts[:-1]:
        automaton.extend(text, cited)
        automaton.separate()
    automaton.extend(parts[-1])
    automaton.extend(grown)
    return automaton


def ends(text: Sequence[int], part: Sequence[int]) -> list[int]:
    """Return the last position of every occurrence of `part`."""
    n = len(part)
    return [i + n - 1 for i in range(len(text) - n + 1) if list(text[i : i + n]) == list(part)]


def find(automaton: SuffixAutomaton, tokens: Sequence[int]) -> int:
    """Return the state of `tokens`, -1 if they do not occur in a row."""
    state = ROOT_STATE
    for token in tokens:
        if automaton.first_token[state] == token:
            state = automaton.first_target[state]
        else:
            state = automaton.more.get(state, {}).get(token, -1)
        if state < 0:
            break
    return state


def parts_of(text: Sequence[int]) -> set[tuple[int, ...]]:
    n = len(text)
    return {tuple(text[i:j]) for i in range(n) for j in range(i + 1, n + 1)}


@given(st.lists(texts, min_size=1, max_size=3), texts)
def test_match_is_the_longest_suffix_that_occurred_before(parts: list[Text], grown: Text) -> None:
    automaton = make(parts, grown)
    text = automaton.tokens
    repeated = [n for n in range(1, len(text)) if len(ends(text, text[-n:])) > 1]
    assert automaton.length[automaton.match()] == max(repeated, default=0)


@given(texts, texts)
def test_counts_latest_ends_and_children_are_those_of_a_search(built: Text, grown: Text) -> None:
    automaton = make([built], grown)
    whole = automaton.tokens
    for part in parts_of(whole):
        state = find(automaton, part)
        before = [end for end in ends(whole, part) if end < len(whole) - 1]
        assert automaton.count[state] == len(before)
        assert automaton.latest[state] == max(before, default=-1)
        longest = whole[: max(ends(whole, part)) + 1][-automaton.length[state] :]
        following = {whole[end + 1] for end in ends(whole, longest) if end + 1 < len(whole)}
        assert {token for token, _ in automaton.children(state)} == following


@given(st.lists(texts, min_size=2, max_size=3), texts)
def test_no_match_crosses_a_border(parts: list[Text], grown: Text) -> None:
    automaton = make(parts, grown)
    chunks = [*parts[:-1], [*parts[-1], *grown]]
    current = set().union(*(parts_of(piece) for piece in chunks))
    for part in parts_of([token for piece in chunks for token in piece]):
        assert (find(automaton, part) >= 0) is (part in current)
    for state in range(len(automaton.length)):
        assert all(token < VOCAB for token, _ in automaton.children(state))


@given(texts, texts, texts, st.booleans())
def test_texts_grow_token_by_token_as_they_are_built(
    first: Text, grown: Text, last: Text, cited: bool
) -> None:
    automaton, whole = SuffixAutomaton(VOCAB), SuffixAutomaton(VOCAB)
    marks = [cited] * len(first) + [False] * len(grown) + [cited] * len(last)
    whole.extend([*first, *grown, *last], marks)
    automaton.extend(first, cited)
    automaton.extend(grown[:3])
    automaton.extend(grown[3:])
    automaton.extend(last, cited)
    assert vars(automaton) == vars(whole)


def test_cited_keeps_the_end_inside_a_document() -> None:
    automaton = SuffixAutomaton(VOCAB)
    automaton.extend([0, 1, 2], [False, True, True])
    automaton.extend([3, 1, 2, 3])
    state = find(automaton, [1, 2])
    assert automaton.latest[state] == 5
    assert automaton.cited[state] == 2


def test_a_repeated_token_stays_linear_in_states() -> None:
    automaton = SuffixAutomaton(VOCAB)
    automaton.extend([1] * 2000)
    assert automaton.length[automaton.match()] == 1999
    assert len(automaton.length) == 2001


def test_separators_follow_every_text_but_the_last() -> None:
    automaton = make([[0, 1], [2], [3, 0]], [])
    assert automaton.tokens == [0, 1, VOCAB, 2, VOCAB + 1, 3, 0]
    automaton.separate()
    assert automaton.tokens == [0, 1, VOCAB, 2, VOCAB + 1, 3, 0, VOCAB + 2]
