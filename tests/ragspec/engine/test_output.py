"""What a generation holds, and that its parts agree."""

from __future__ import annotations

import pytest

from ragspec.engine.engine import Engine
from ragspec.engine.output import Generation
from ragspec.sampling.settings import Sampling, TokenLogprob
from tests.support import tiny


@pytest.fixture(scope="module")
def generation() -> Generation:
    engine = Engine(tiny.model("llama"), tiny.tokenizer(), drafter="context", budget=6)
    result: Generation = engine.generate(
        "ab ab ab", Sampling(temperature=1.0, seed=7), max_new_tokens=9, logprobs=2
    )
    return result


def test_the_parts_of_a_generation_agree(generation: Generation) -> None:
    assert generation.text == tiny.tokenizer().decode(generation.tokens, skip_special_tokens=True)
    assert generation.prompt_tokens == tiny.tokenizer()("ab ab ab")["input_ids"]
    assert generation.report.tokens == len(generation.tokens)
    assert generation.report.label == generation.label == "exact"
    assert generation.report.finish_reason == generation.finish_reason
    assert generation.report.seed == 7
    assert generation.logprobs is not None
    for token, scored in zip(generation.tokens, generation.logprobs, strict=True):
        assert scored.token == token
        assert scored.logprob <= scored.top[0][1] <= 0.0
        assert scored.top[0][1] >= scored.top[1][1]


def test_a_logprob_is_a_value() -> None:
    assert TokenLogprob(3, -0.5) == TokenLogprob(3, -0.5, ())
    with pytest.raises(AttributeError):
        TokenLogprob(3, -0.5).token = 4  # type: ignore[misc]


def test_no_logprobs_unless_requested_for() -> None:
    engine = Engine(tiny.model("llama"), drafter=None)
    assert engine.generate([1, 2], max_new_tokens=2).logprobs is None
    bare = engine.generate([1, 2], max_new_tokens=2, logprobs=True)
    assert [scored.top for scored in bare.logprobs] == [(), ()]
    assert bare.text == ""
