from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ragspec.errors import InputError, PromptTooLongError, SamplingError
from ragspec.request import DEFAULT_NEW_TOKENS, end_tokens, read_options
from ragspec.runs import RowSettings
from ragspec.sampling import Sampling


def read(sampling: Sampling | None = None, **options: Any) -> RowSettings:
    return read_options(
        options,  # type: ignore[arg-type]
        sampling or Sampling(),
        [[1, 2, 3], [4] * 10],
        ends=[7],
        has_text=True,
        vocab_size=50,
        limit=100,
    )


def test_penalties_that_look_up_the_prompt_need_ids_that_have_logits() -> None:
    asked: list[dict[str, Any]] = [{"repetition_penalty": 1.1}, {"no_repeat_ngram_size": 2}]
    for settings in asked:
        read(Sampling(**settings))
        with pytest.raises(SamplingError, match="the id 60 in a prompt"):
            read_options(
                {},
                Sampling(**settings),
                [[1], [2, 60]],
                ends=[],
                has_text=False,
                vocab_size=50,
                limit=None,
            )


def test_new_tokens_default_to_what_the_context_leaves() -> None:
    assert read().stop.max_new_tokens == 90
    unlimited = read_options(
        {}, Sampling(), [[1]], ends=[], has_text=False, vocab_size=9, limit=None
    )
    assert unlimited.stop.max_new_tokens == DEFAULT_NEW_TOKENS


def test_end_tokens_are_the_models_and_the_callers() -> None:
    assert read(stop_token_ids=[9]).stop.ends == {7, 9}
    assert read(stop_token_ids=[9], ignore_eos=True).stop.ends == {9}


def test_no_stop_may_be_said_with_none() -> None:
    assert read(stop=None, stop_token_ids=None).stop == read().stop


def test_end_tokens_come_from_the_generation_config_first() -> None:
    def model(found: Any) -> Any:
        return SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=found))

    tokenizer = SimpleNamespace(eos_token_id=3)
    assert end_tokens(model([1, 2]), tokenizer) == [1, 2]
    assert end_tokens(model(0), tokenizer) == [0]
    assert end_tokens(model(None), tokenizer) == [3]
    assert end_tokens(model(None), None) == []


@pytest.mark.parametrize(("asked", "kept"), [(False, None), (True, 0), (0, 0), (5, 5)])
def test_logprobs(asked: int | bool, kept: int | None) -> None:
    assert read(logprobs=asked).logprobs == kept


def test_refusals() -> None:
    with pytest.raises(InputError, match="Did you mean 'max_new_tokens'"):
        read(max_tokens=3)
    with pytest.raises(InputError, match="at least 1"):
        read(max_new_tokens=0)
    with pytest.raises(PromptTooLongError, match="max_new_tokens=90"):
        read(max_new_tokens=91)
    with pytest.raises(InputError, match="empty"):
        read(stop=["a", ""])
    with pytest.raises(InputError, match="whole number"):
        read(max_new_tokens="5")
    for stop in (5, ["a", 5]):
        with pytest.raises(InputError, match="stop is"):
            read(stop=stop)
    with pytest.raises(InputError, match="stop_token_ids has 'a'"):
        read(stop_token_ids=["a"])
    with pytest.raises(InputError, match="0 to 50"):
        read(logprobs=51)
    with pytest.raises(SamplingError, match="logit_bias"):
        read(Sampling(logit_bias={50: 1.0}))
