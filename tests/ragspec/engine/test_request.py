import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ragspec.engine.prompts import end_tokens
from ragspec.engine.request import DEFAULT_NEW_TOKENS, Options, Request, read_requests
from ragspec.errors import InputError, PromptTooLongError, SamplingError, pluralize
from ragspec.sampling.settings import Sampling
from ragspec.sampling.transform import Transform
from tests.support import tiny


def target(vocab_size: int = 50, limit: int | None = 100, ends: int | None = 7) -> Any:
    """Return the part of a target that requests are checked against."""
    return SimpleNamespace(
        loaded=None,
        vocab_size=vocab_size,
        input_size=100,
        max_length=limit,
        generation_config=SimpleNamespace(eos_token_id=ends),
        check_prompt=lambda ids: None,
    )


def read(sampling: Sampling | None = None, **options: Any) -> Request:
    prompts = [[1, 2, 3], [4] * 10]
    return read_requests(prompts, sampling, options, target(), tiny.tokenizer())[0][0]  # type: ignore[arg-type]


def test_penalties_that_look_up_the_prompt_need_ids_that_have_logits() -> None:
    requests: list[dict[str, Any]] = [{"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 2}]
    for settings in requests:
        read(Sampling(**settings))
        with pytest.raises(SamplingError, match="the id 60 in a prompt"):
            read_requests([[1], [2, 60]], Sampling(**settings), {}, target(), None)


def test_new_tokens_default_to_what_the_context_leaves() -> None:
    assert read().stop.max_new_tokens == 90
    with pytest.raises(PromptTooLongError, match="set max_new_tokens to 90 or less"):
        read(max_new_tokens=91)
    (unlimited,), _ = read_requests([[1]], None, {}, target(limit=None), None)
    assert unlimited.stop.max_new_tokens == DEFAULT_NEW_TOKENS


def test_none_is_the_same_as_nothing() -> None:
    assert read(**dict.fromkeys(Options.__annotations__)) == read()


@pytest.mark.parametrize("ids", [(9,), np.array([9]), torch.tensor([9])])
def test_ids_may_come_in_any_collection(ids: Any) -> None:
    for further in (ids, {9}, iter([9])):
        assert read(stop_token_ids=further).stop.ends == {7, 9}
    assert read(prediction=[None, ids]) == read()
    assert read(prediction=ids) == read(prediction=[9])
    request, _ = read_requests([1], None, {"resume_from": ids, "draft_prompt": ids}, target(), None)
    assert request[0].resume_from == request[0].draft_prompt == (9,)


@pytest.mark.parametrize("wrong", [50, 10**6, -1])
def test_end_tokens_that_the_model_never_writes_are_refused(wrong: int) -> None:
    match = f"stop_token_ids has the token id {wrong}; .* 0 to 49"
    for sampling, ids in ((None, [9, wrong]), (Sampling(min_new_tokens=4), [wrong])):
        with pytest.raises(InputError, match=match):
            read(sampling, stop_token_ids=ids)


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(InputError, match="min_new_tokens is 9 and max_new_tokens is 8; expected"):
        read(Sampling(min_new_tokens=9), max_new_tokens=8)
    assert read(Sampling(min_new_tokens=8), max_new_tokens=8).stop.max_new_tokens == 8


def test_end_tokens_come_from_the_generation_config_first() -> None:
    tokenizer = SimpleNamespace(eos_token_id=3)
    for ends, expected in (([1, 2], [1, 2]), (0, [0]), (None, [3])):
        assert end_tokens(SimpleNamespace(eos_token_id=ends), tokenizer) == expected
    assert end_tokens(None, None) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"logits_processor": min}, "logits_processor is <built-in"),
        ({"logits_processor": [3]}, r"logits_processor is \[3\]; expected a list"),
        ({"stopping_criteria": min}, "stopping_criteria is <built-in"),
        ({"stopping_criteria": "x"}, "stopping_criteria is 'x'"),
        *(({name: "no"}, f"{name} is 'no'") for name in ("ignore_eos", "ignore_defaults", "spans")),
        *(({"stop_token_ids": n}, f"stop_token_ids is {n}") for n in (3, 0, np.array(0))),
        *(({"texts": wrong}, "texts is .*; expected a list of .*Text") for wrong in (5, ["x"])),
        *(({"spans": wrong}, "spans is .*; expected a list of") for wrong in (5, [5], [(1, 2)])),
        *(({"spans": [(*at, 0, 0)]}, "the prompt, 0 to 3") for at in ((-1, 2), (2, 1), (0, 4))),
        *(({"transform": wrong}, "expected a Transform") for wrong in (3, Transform, "knn")),
        ({"tenant": 3}, "tenant is 3"),
        ({"logprobs": "x"}, "logprobs is 'x'"),
        ({"logprobs": 1.5}, "logprobs is 1.5"),
        ({"logprobs": 51}, "0 to 50"),
        ({"stop": ["a", ""]}, "empty"),
        *(({"stop": stop}, "stop is") for stop in (5, ["a", 5])),
        ({"stop_token_ids": ["a"]}, "stop_token_ids has the token id 'a'"),
        ({"max_tokens": 3}, "Did you mean 'max_new_tokens'"),
        ({"max_new_tokens": 0}, "at least 1"),
        *(
            ({"max_new_tokens": wrong}, "whole number, at least 1")
            for wrong in ("5", True, np.array([5]), torch.tensor(5.0), torch.tensor(True), 5.0)
        ),
    ],
)
def test_options_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        read(**options)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        *(({"logit_bias": {3: v}}, f"the bias {v!r}") for v in (math.nan, math.inf, 10**39, "1")),
        ({"logit_bias": {"3": 1.0}}, "logit_bias has the token id '3'"),
        ({"logit_bias": {50: 1.0}}, "logit_bias"),
        ({"logit_bias": [3]}, r"logit_bias is \[3\]; expected a mapping"),
        ({"sequence_bias": {(3, 50): 1.0}}, "sequence_bias has the token id 50; expected 0 to 49"),
        ({"sequence_bias": {(): 1.0}}, r"sequence_bias has \(\)"),
        ({"sequence_bias": {3: 1.0}}, "sequence_bias has 3; expected token ids"),
        ({"sequence_bias": {(3,): float("nan")}}, "sequence_bias has the bias nan"),
        ({"sequence_bias": [[[3], 1.0]]}, "expected a mapping"),
        ({"bad_words_ids": [[3], [50]]}, "bad_words_ids has the token id 50; expected 0 to 49"),
        *(
            ({"bad_words_ids": [w]}, "bad_words_ids has (the token id -1|..;|3)")
            for w in ([-1], [], 3)
        ),
        ({"bad_words_ids": 3}, "bad_words_ids is 3"),
        ({"bad_words_ids": [[7]]}, "which are end tokens"),
    ],
)
def test_biases_are_numbers_of_ids_with_logits(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(SamplingError, match=match):
        read(Sampling(**settings))


def test_biases_that_can_be_applied_pass() -> None:
    of_numpy: Any = np.array([5, 6])
    read(
        Sampling(
            logit_bias={3: float("-inf"), of_numpy[0]: 2},
            sequence_bias={(3, 49): of_numpy[1]},
            bad_words_ids=[[3], (7, 4), of_numpy],
        )
    )
    read(Sampling(bad_words_ids=[[7], [8]]))
    read(Sampling(bad_words_ids=[[7]]), ignore_eos=True)


def test_seeds_are_one_or_as_many_as_the_prompts() -> None:
    for seed in (None, 3, [1, None], (1, 2), np.array([1, 2])):
        read(Sampling(seed=seed))  # type: ignore[arg-type]
    for seeds in ([], [1], [1, 2, 3], np.array([1])):
        count = pluralize(len(seeds), "seed")
        with pytest.raises(SamplingError, match=f"got {count} for 2 prompts"):
            read(Sampling(seed=seeds))  # type: ignore[arg-type]
    read(Sampling(seed=[-(1 << 63), (1 << 63) - 1]))  # of 64 bits everywhere, as with OpenAI
    for wrong in ({5}, {5: 1}, "5", b"5", 1.0, [None, "5"], 1 << 63, [0, -(1 << 63) - 1]):
        with pytest.raises(SamplingError, match=rf"a whole number from -{1 << 63} to \d{{18}}7\."):
            Sampling(seed=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(("query", "selected"), [(False, None), (True, 0), (0, 0), (5, 5)])
def test_logprobs(query: int | bool, selected: int | None) -> None:
    assert read(logprobs=query).logprobs == selected


@pytest.mark.parametrize("five", [np.int64(5), np.array(5), torch.tensor(5)])
def test_counts_are_whole_numbers_of_any_kind(five: Any) -> None:
    rule = read(max_new_tokens=five, stop_after=five).stop
    assert (rule.max_new_tokens, rule.stop_after) == (5, 5) and type(rule.stop_after) is int
