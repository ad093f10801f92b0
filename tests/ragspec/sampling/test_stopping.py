"""When a text ends: end tokens, lengths, criteria, stop strings over token borders."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.sampling import stopping
from ragspec.sampling.stopping import EndRepetition, StopRule, StopState, repeats
from tests.ragspec.sampling.test_text_output import encode
from tests.support import tiny

TEXTS = st.text(alphabet="the dra ft.\nkê€é漢😀 ", min_size=1, max_size=24)


@given(TEXTS, st.data())
@settings(max_examples=80)
def test_a_stop_string_ends_the_text_where_it_is_complete(text: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(text) - 1))
    stop = text[start : start + data.draw(st.integers(1, 5))]
    bpe, tokens = tiny.bpe_tokenizer(), encode(text)
    state = StopState(StopRule(frozenset(), 1000, (stop, "\x00never")), bpe)
    for count, token in enumerate(tokens, start=1):
        display = bpe.decode(tokens[:count]).rstrip("�")
        ended = state.push(token)
        assert ended == (stop in display)
        if ended:
            break
    assert state.reason == "stop"
    assert state.text == text[: text.index(stop)]


def test_peek_agrees_with_push_and_changes_nothing() -> None:
    bpe, tokens = tiny.bpe_tokenizer(), encode("the draft. € then more")
    state = StopState(StopRule(frozenset(), 1000, ("€ t",)), bpe)
    state.push(tokens[0])
    expected = ["€ t" in bpe.decode(tokens[: count + 1]) for count in range(1, len(tokens))]
    assert [state.peek(tokens[1 : count + 1]) for count in range(1, len(tokens))] == expected
    assert any(expected)
    assert state.reason is None
    assert state.count == 1
    pushed = [state.push(token) for token in tokens[1 : 2 + expected.index(True)]]
    assert pushed == expected[: len(pushed)]


def test_ends_and_lengths() -> None:
    state = StopState(StopRule(frozenset({7}), 3))
    assert not state.peek([])
    assert state.peek([1, 7])
    assert not state.peek([1, 2])
    assert state.peek([1, 2, 3])
    assert [state.push(token) for token in (1, 2, 3)] == [False, False, True]
    assert state.reason == "length"
    both = StopState(StopRule(frozenset({7}), 1))
    assert both.push(7)
    assert both.reason == "stop"


def test_criteria_see_prompt_and_text_after_every_token() -> None:
    known: list[list[int]] = []

    def three(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        known.append(ids[0].tolist())
        return torch.tensor([ids.shape[1] >= 5])

    rule = StopRule(frozenset(), 100, criteria=(three, lambda ids, scores: False))
    state = StopState(rule, None, [8, 9])
    assert [state.push(token) for token in (1, 2, 3)] == [False, False, True]
    assert known == [[8, 9, 1], [8, 9, 1, 2], [8, 9, 1, 2, 3]]
    assert state.reason == "stop"


@pytest.mark.parametrize("verdict", [None, "yes", [None], []])
def test_a_criterion_without_a_verdict_is_refused(verdict: Any) -> None:
    state = StopState(StopRule(frozenset(), 9, criteria=(lambda ids, scores: verdict,)), None, [8])
    with pytest.raises(InputError, match=r"criterion returned .*; expected True"):
        state.push(1)


ROUND = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(ROUND, st.lists(st.integers(10, 19), max_size=20), st.integers(1, 30))
def test_a_cycle_counts_from_its_third_round_and_some_tokens_on(
    cycle: list[int], before: list[int], times: int
) -> None:
    doubled = cycle * 2
    period = next(n for n in range(1, len(cycle) + 1) if doubled[n : n + len(cycle)] == cycle)
    enough = len(cycle) * times >= max(stopping.LEAST, period * stopping.ROUNDS)
    assert repeats([*before, *cycle * times]) is enough


def test_the_longest_cycle() -> None:
    assert repeats(list(range(stopping.LONGEST)) * stopping.ROUNDS)
    assert not repeats(list(range(stopping.LONGEST + 1)) * stopping.ROUNDS)


def test_repetition_in_the_prompt_does_not_count() -> None:
    ids = torch.tensor([[7] * 40])
    assert EndRepetition(0)(ids, ids)
    assert not EndRepetition(20)(ids, ids)
    assert EndRepetition(16)(ids, ids)
