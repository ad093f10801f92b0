"""A text that says the same three times is over, and no other is."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.engine.engine import Engine
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import LEAST, LONGEST, ROUNDS, EndRepetition, repeats
from tests.support import tiny

ROUND = st.lists(st.integers(0, 9), min_size=1, max_size=12)


@given(ROUND, st.lists(st.integers(10, 19), max_size=20), st.integers(1, 30))
def test_a_cycle_counts_from_its_third_round_and_some_tokens_on(
    cycle: list[int], before: list[int], times: int
) -> None:
    doubled = cycle * 2
    period = next(n for n in range(1, len(cycle) + 1) if doubled[n : n + len(cycle)] == cycle)
    enough = len(cycle) * times >= max(LEAST, period * ROUNDS)
    assert repeats([*before, *cycle * times]) is enough


@given(st.lists(st.integers(0, 400), unique=True, max_size=300))
def test_what_never_comes_back_is_no_repetition(tokens: list[int]) -> None:
    assert not repeats(tokens)


def test_the_longest_cycle() -> None:
    assert repeats(list(range(LONGEST)) * ROUNDS)
    assert not repeats(list(range(LONGEST + 1)) * ROUNDS)


def test_the_prompt_is_not_looked_at() -> None:
    ids = torch.tensor([[7] * 40])
    assert EndRepetition(0)(ids, ids)
    assert not EndRepetition(20)(ids, ids)
    assert EndRepetition(16)(ids, ids)


def test_plain_and_speculative_texts_end_alike() -> None:
    model, prompt = tiny.model(), [5, 6] * 10
    forced = Sampling(logit_bias={7: 30.0}, temperature=0.9, seed=1)
    criteria = [EndRepetition(len(prompt))]
    plain, drafted = Engine(model, None, None), Engine(model, None, "context", budget=12)
    whole = plain.generate(prompt, forced, max_new_tokens=90).tokens
    cut, result = (
        each.generate(prompt, forced, max_new_tokens=90, stopping_criteria=criteria)
        for each in (plain, drafted)
    )
    first = next(n for n in range(1, len(whole)) if repeats(whole[:n]))
    assert cut.tokens == result.tokens == whole[:first]
    assert cut.finish_reason == "stop" and result.report.accepted > 4
