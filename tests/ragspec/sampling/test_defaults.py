"""A model's own generation config counts in the engine as it does in transformers' generate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, SamplingError
from ragspec.pipelines.cli.compare import margin_at
from ragspec.sampling.settings import Sampling
from ragspec.sampling.transform import default_processors, with_defaults
from tests.support import tiny
from tests.support.generation_settings import NEW, PAD, PROMPTS, SAMPLED, greedy, plain
from tests.support.mixing import MixingDrafter

REFUSED = [name for name in greedy() if name.startswith(("guidance", "watermarking"))]
HONOURED = [name for name in greedy() if name not in REFUSED]


def model_that_asks(**request: Any) -> Any:
    """Return a model with these settings in its generation config, and no end but theirs."""
    model = copy.deepcopy(tiny.model("llama"))
    for name, value in {"eos_token_id": None, "pad_token_id": PAD, **request}.items():
        setattr(model.generation_config, name, value)
    return model


def theirs(model: Any, **call: Any) -> list[list[int]]:
    """Return what transformers writes greedily after each prompt alone."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, **call}
    texts = []
    for prompt in PROMPTS:
        out = model.generate(torch.tensor([prompt]), **settings)
        texts.append(out[0, len(prompt) :].tolist())
    return texts


def ours(model: Any, sampling: Sampling | None = None, **options: Any) -> list[list[int]]:
    """Return the engine's texts of both prompts in one batch, drafted where `truth` helps."""
    truth = options.pop("truth", None)
    drafter = None
    if truth is not None:
        drafter = MixingDrafter(dict(zip(map(tuple, PROMPTS), truth, strict=True)), right=0.8)
    engine = Engine(model, drafter=drafter, budget=6)
    results = engine.generate(PROMPTS, sampling, max_new_tokens=NEW, **options)
    if drafter is not None:
        assert sum(result.report.accepted for result in results) > 0
    return [result.tokens for result in results]


@pytest.mark.parametrize("name", HONOURED)
def test_greedy_text_is_that_of_transformers(name: str) -> None:
    model = model_that_asks(**greedy()[name])
    expected = theirs(model)
    assert expected != plain() or name == "forced_bos_token_id"
    assert ours(model) == expected
    assert ours(model, truth=expected) == expected
    assert ours(model, ignore_defaults=True, ignore_eos=True) == plain()


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_a_first_token_that_is_forced_and_what_may_not_follow_it(prompt: list[int]) -> None:
    def written(model: Any) -> list[int]:
        out = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        result = Engine(model, drafter=None).generate(prompt, max_new_tokens=NEW).tokens
        assert result == out[0, len(prompt) :].tolist()
        return list(result)

    forced = written(model_that_asks(forced_bos_token_id=7))
    assert (forced[0] == 7) == (len(prompt) == 1)
    first = forced[1] if len(prompt) == 1 else forced[0]
    model = model_that_asks(forced_bos_token_id=7, begin_suppress_tokens=[first])
    assert written(model) != forced


def test_several_settings_at_once() -> None:
    one, two = plain()
    model = model_that_asks(
        repetition_penalty=1.2,
        no_repeat_ngram_size=2,
        bad_words_ids=[[one[1]]],
        sequence_bias=[[[two[2]], -20.0]],
        min_length=9,
        eos_token_id=[one[2], two[4]],
        exponential_decay_length_penalty=(2, 1.5),
        suppress_tokens=[7, one[4]],
        remove_invalid_values=True,
    )
    expected = theirs(model)
    assert ours(model, truth=expected) == expected != plain()


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_the_bridge_can_follow_is_refused_by_name(name: str) -> None:
    model = model_that_asks(**greedy()[name])
    with pytest.raises(InputError, match=name.split(",")[0]):
        ours(model)
    assert ours(model, ignore_defaults=True) == plain()


def test_what_chooses_among_tokens_is_the_sampling_s() -> None:
    request: dict[str, Any] = {"do_sample": True, "num_beams": 3}
    for settings in SAMPLED.values():
        request |= settings
    assert ours(model_that_asks(**request)) == plain()
    sampling = Sampling(temperature=0.8, seed=3)
    assert ours(model_that_asks(**request), sampling) == ours(model_that_asks(), sampling)


def test_what_the_call_says_stands_before_what_the_model_says() -> None:
    one, two = plain()
    model = model_that_asks(
        repetition_penalty=1.5,
        no_repeat_ngram_size=1,
        min_new_tokens=9,
        bad_words_ids=[[one[0]]],
        sequence_bias=[[[two[2]], -20.0]],
        eos_token_id=[one[3]],
    )
    off = Sampling(
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_new_tokens=0,
        bad_words_ids=(),
        sequence_bias={},
    )
    assert ours(model, off, ignore_eos=True) == plain()
    assert ours(model, off)[0] == one[: one.index(one[3]) + 1]
    mild = Sampling(no_repeat_ngram_size=0, repetition_penalty=1.1)
    call = {"no_repeat_ngram_size": 0, "repetition_penalty": 1.1}
    assert ours(model, mild) == theirs(model, **call) != theirs(model, no_repeat_ngram_size=0)
    assert with_defaults(mild, None) == mild


def test_ids_that_the_model_never_writes_are_passed_over() -> None:
    one, two = plain()
    model = model_that_asks(
        suppress_tokens=[one[2], 10**6, -1],
        begin_suppress_tokens=[two[0], 10**6],
        eos_token_id=[one[4], 10**6],
        min_new_tokens=7,
        min_length=11,
    )
    assert ours(model) == theirs(model) != plain()


def test_settings_out_of_range_are_named() -> None:
    with pytest.raises(SamplingError, match="repetition_penalty is -1"):
        ours(model_that_asks(repetition_penalty=-1.0))


def test_a_model_without_a_config_asks_for_nothing() -> None:
    assert default_processors(None, torch.tensor([[1, 2]]), 9, [3], 97) == []
    assert with_defaults(Sampling(), None) == Sampling()
    assert (
        default_processors(
            tiny.model("llama").generation_config, torch.tensor([[1, 2]]), 9, [3], 97
        )
        == []
    )


def test_the_margin_of_a_choice_is_that_of_the_model_s_its_settings() -> None:
    model = model_that_asks(repetition_penalty=1.5, suppress_tokens=[plain()[0][2]])
    engine = Engine(model, drafter=None)
    text = engine.generate(PROMPTS[0], max_new_tokens=NEW)
    scores = model.generate(
        torch.tensor(PROMPTS[:1]),
        max_new_tokens=NEW,
        do_sample=False,
        return_dict_in_generate=True,
        output_scores=True,
    ).scores
    for index in range(NEW):
        best = scores[index][0].topk(2).values
        expected = float(best[0] - best[1])
        assert margin_at(engine, text, index, Sampling()) == pytest.approx(expected, abs=1e-3)
