"""Processors against transformers' own: on one input, and token by token under `generate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ragspec.engine.engine import Engine
from ragspec.sampling.processors import (
    CountPenalty,
    HFProcessor,
    MinimumLength,
    Processor,
    RepetitionPenalty,
    TokenBias,
    build_processors,
)
from ragspec.sampling.settings import Sampling
from tests.support import tiny

V = 12
CONTEXT = [3, 4, 3, 5]
PATHS = [[], [7], [7, 3], [1, 2, 8]]
PROMPT = [5, 6, 7, 8, 9, 5, 6, 7]
NEW = 24


def logits(rows: int = len(PATHS), seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def row_by_row(theirs: Any, values: torch.Tensor) -> torch.Tensor:
    rows = [
        theirs(torch.tensor([[*CONTEXT, *path]]), values[i : i + 1].clone())
        for i, path in enumerate(PATHS)
    ]
    return torch.cat(rows)


def pairs() -> dict[str, tuple[Processor, Any]]:
    from transformers import generation as hf

    return {
        "repetition": (RepetitionPenalty(1.7), hf.RepetitionPenaltyLogitsProcessor(1.7)),
        "bias": (
            TokenBias({2: 1.5, 9: -3.0}),
            hf.SequenceBiasLogitsProcessor({(2,): 1.5, (9,): -3.0}),
        ),
        "minimum": (
            MinimumLength(4, [0, 11], 2),
            hf.MinNewTokensLengthLogitsProcessor(2, 4, [0, 11], device="cpu"),
        ),
        "no-repeat": (
            HFProcessor(hf.NoRepeatNGramLogitsProcessor(1)),
            hf.NoRepeatNGramLogitsProcessor(1),
        ),
    }


@pytest.mark.parametrize("name", ["repetition", "bias", "minimum", "no-repeat"])
def test_every_node_gets_what_transformers_gives_its_path(name: str) -> None:
    ours, theirs = pairs()[name]
    values = logits()
    before = values.clone()
    result = ours.apply(values, CONTEXT, PATHS)
    assert torch.equal(values, before)  # the target's logits are not ours to change
    torch.testing.assert_close(result, row_by_row(theirs, values))
    assert not torch.equal(result, values)


def test_a_processor_that_is_blind_to_the_path_would_be_caught() -> None:
    ours, theirs = pairs()["repetition"]
    blind = ours.apply(logits(), CONTEXT, [[]] * len(PATHS))
    assert not torch.equal(blind, row_by_row(theirs, logits()))


def test_counts_are_of_generated_tokens_only() -> None:
    penalty = CountPenalty(frequency=0.5, presence=2.0, prompt_length=2)
    result = penalty.apply(torch.zeros(2, V), CONTEXT, [[], [3, 3]])
    expected = torch.zeros(2, V)
    expected[0, 3] = expected[0, 5] = -2.5  # 3 and 5 once each behind the prompt 3, 4
    expected[1, 3], expected[1, 5] = -3.5, -2.5
    torch.testing.assert_close(result, expected)


@given(st.lists(st.lists(st.integers(0, V - 1), max_size=4), min_size=1, max_size=5))
def test_nodes_together_are_nodes_one_by_one(paths: list[list[int]]) -> None:
    instance: list[Processor] = [
        RepetitionPenalty(1.3),
        CountPenalty(0.4, 0.2, 2),
        MinimumLength(5, [1], 2),
    ]
    values = logits(len(paths))
    for processor in instance:
        together = processor.apply(values, CONTEXT, paths)
        alone = [processor.apply(values[i : i + 1], CONTEXT, [p]) for i, p in enumerate(paths)]
        torch.testing.assert_close(together, torch.cat(alone))


def test_a_processor_of_the_user_is_called_as_plain_decoding_calls_it() -> None:
    calls = []

    def record(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        calls.append((ids.tolist(), tuple(values.shape)))
        return values + 1

    result = HFProcessor(record).apply(logits(2), CONTEXT, [[], [7]])
    assert calls == [([CONTEXT], (1, V)), ([[*CONTEXT, 7]], (1, V))]
    torch.testing.assert_close(result, logits(2) + 1)


def test_only_what_was_requested_for_is_built() -> None:
    assert build_processors(Sampling(), 3, [1]) == []
    assert build_processors(Sampling(min_new_tokens=3), 3, []) == []  # nothing could end it
    everything = Sampling(
        sequence_bias={(3, 4): 1.0},
        logit_bias={3: 1.0},
        repetition_penalty=1.1,
        presence_penalty=0.1,
        no_repeat_ngram_size=3,
        bad_words_ids=[[3]],
        min_new_tokens=2,
    )
    result = build_processors(everything, 3, [1], [lambda ids, values: values])
    assert [processor.lazy for processor in result] == [True, False, False, False, *[True] * 2] + [
        False,
        True,
    ]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(tiny.model("llama"), drafter=None)


def settings_that_bite(plain: list[int]) -> dict[str, dict[str, Any]]:
    """Return settings that forbid or favour something in the plain text."""
    first, second, third = (plain[0],), (plain[2], plain[3]), (plain[5], plain[6])
    return {
        "repetition": {"repetition_penalty": 1.3},
        "no repeat": {"no_repeat_ngram_size": 1},
        "bad words": {"bad_words_ids": [list(second), list(third)]},
        "sequence bias": {"sequence_bias": {first: -20.0, second: -20.0, (7,): 1.5}},
        "all": {
            "repetition_penalty": 1.2,
            "no_repeat_ngram_size": 2,
            "bad_words_ids": [list(second), [7, 8]],
            "sequence_bias": {(7,): 2.0},
        },
    }


@pytest.mark.parametrize("name", ["repetition", "no repeat", "bad words", "sequence bias", "all"])
def test_greedy_text_is_that_of_transformers(name: str, engine: Engine) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=NEW).tokens
    chosen = settings_that_bite(plain)[name]
    ids = torch.tensor([PROMPT])
    theirs = engine.model.generate(ids, max_new_tokens=NEW, do_sample=False, **chosen)
    expected = theirs[0, len(PROMPT) :].tolist()
    assert expected != plain
    assert engine.generate(PROMPT, Sampling(**chosen), max_new_tokens=NEW).tokens == expected


def test_the_least_number_of_tokens_is_that_of_transformers(engine: Engine) -> None:
    plain = engine.generate(PROMPT, max_new_tokens=NEW).tokens
    end = plain[3]
    model_end = engine.model.generation_config.eos_token_id
    ids = torch.tensor([PROMPT])
    for least in (0, 4, 9):
        theirs = engine.model.generate(
            ids,
            max_new_tokens=NEW,
            min_new_tokens=least,
            do_sample=False,
            eos_token_id=[end, model_end],
        )
        ours = engine.generate(
            PROMPT,
            Sampling(min_new_tokens=least),
            max_new_tokens=NEW,
            stop_token_ids=[end],
        )
        assert ours.tokens == theirs[0, len(PROMPT) :].tolist()
        assert len(ours.tokens) >= max(least, 4)
