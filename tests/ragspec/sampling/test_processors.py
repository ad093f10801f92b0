"""Processors against those of transformers: on one input, and token by token in `generate`."""

import copy
import re
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers import generation as hf

from ragspec import Engine, Sampling
from ragspec.errors import InputError, PromptTooLongError, SamplingError
from ragspec.pipelines.cli.show import margin_at
from ragspec.sampling.penalties import Penalties
from ragspec.sampling.processors import (
    HFProcessor,
    Processor,
    SequenceBias,
    build_processors,
    default_processors,
)
from ragspec.verification.open import open_target
from tests.support import tiny
from tests.support.generation_settings import NEW, PAD, PROMPTS, SAMPLED, greedy, plain
from tests.support.noisy import NoisyTrees

V = 12
CONTEXT = [3, 4, 3, 5]
PATHS = [[], [7], [7, 3], [1, 2, 8]]


def logits(rows: int = len(PATHS), seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, V, generator=torch.Generator().manual_seed(seed))


def row_by_row(theirs: Any, values: torch.Tensor) -> torch.Tensor:
    rows = [
        theirs(torch.tensor([[*CONTEXT, *path]]), values[i : i + 1].clone())
        for i, path in enumerate(PATHS)
    ]
    return torch.cat(rows)


def pairs() -> dict[str, tuple[Processor, Any]]:
    sequences = {(8, 9): 0.3, (9,): -3.1, (3, 5, 9): 0.7, (4, 3, 5, 2): 5.0, (2, 8, 1): 2.5}
    words = [[9], [11], [3, 2], [3, 5, 1], [8, 11]]
    return {
        "repetition": (Penalties(repetition=1.7), hf.RepetitionPenaltyLogitsProcessor(1.7)),
        "bias": (
            Penalties({2: 1.5, 9: -3.0}),
            hf.SequenceBiasLogitsProcessor({(2,): 1.5, (9,): -3.0}),
        ),
        "sequences": (SequenceBias(sequences.items()), hf.SequenceBiasLogitsProcessor(sequences)),
        "bad words": (
            build_processors(Sampling(bad_words_ids=words), 2, [11])[0],
            hf.NoBadWordsLogitsProcessor(words, [11]),
        ),
        "minimum": (
            Penalties(ends=[0, 11], minimum=4, prompt_length=2),
            hf.MinNewTokensLengthLogitsProcessor(2, 4, [0, 11], device="cpu"),
        ),
        "no-repeat": (
            HFProcessor(hf.NoRepeatNGramLogitsProcessor(1)),
            hf.NoRepeatNGramLogitsProcessor(1),
        ),
    }


@pytest.mark.parametrize("name", pairs())
def test_every_node_gets_what_transformers_gives_its_path(name: str) -> None:
    ours, theirs = pairs()[name]
    values = logits()
    before = values.clone()
    result = ours.apply(values, CONTEXT, PATHS)
    assert torch.equal(values, before)  # the target's logits do not change
    torch.testing.assert_close(result, row_by_row(theirs, values))
    assert not torch.equal(result, values)


@pytest.mark.parametrize("repetition", [1.0, 1.7])  # the second counts the prompt, too
def test_counts_are_of_generated_tokens_only(repetition: float) -> None:
    penalty = Penalties(repetition=repetition, frequency=0.5, presence=2.0, prompt_length=2)
    result = penalty.apply(torch.zeros(2, V), CONTEXT, [[], [3, 3]])
    expected = torch.zeros(2, V)
    expected[0, 3] = expected[0, 5] = -2.5  # 3 and 5 once each behind the prompt 3, 4
    expected[1, 3], expected[1, 5] = -3.5, -2.5
    torch.testing.assert_close(result, expected)


def test_counts_follow_a_text_that_grows_or_changes() -> None:
    penalty, text = Penalties(repetition=1.3, frequency=0.5, prompt_length=2), [3, 4]
    for context in (text, text, [5], text, [3, 4, 5, 6, 7]):
        fresh = Penalties(repetition=1.3, frequency=0.5, prompt_length=2)
        result = penalty.apply(logits(), context, PATHS)
        assert torch.equal(result, fresh.apply(logits(), list(context), PATHS))
        text.append(3 + len(text) % 5)


def test_a_callers_processor_gets_each_node_with_its_path() -> None:
    calls = []

    def record(ids: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        calls.append((ids.tolist(), tuple(values.shape)))
        return values + 1

    result = HFProcessor(record).apply(logits(2), CONTEXT, [[], [7]])
    assert calls == [([CONTEXT], (1, V)), ([[*CONTEXT, 7]], (1, V))]
    torch.testing.assert_close(result, logits(2) + 1)


def test_only_requested_processors_are_built() -> None:
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
    result = build_processors(everything, 3, [1], extra=[lambda ids, values: values])
    assert [processor.lazy for processor in result] == [False, False, True, False, False, True]


REFUSED = [name for name in greedy() if name.startswith(("guidance", "watermarking"))]
HONOURED = [name for name in greedy() if name not in REFUSED]


def model_that_asks(**request: Any) -> Any:
    """Return a model with these settings, and end tokens from them alone."""
    model = copy.deepcopy(tiny.model("llama"))
    for name, value in {"eos_token_id": None, "pad_token_id": PAD, **request}.items():
        setattr(model.generation_config, name, value)
    return model


def theirs(model: Any, **call: Any) -> list[list[int]]:
    """Return what transformers writes greedily after each prompt alone."""
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 1, **call}
    return [model.generate(torch.tensor([p]), **settings)[0, len(p) :].tolist() for p in PROMPTS]


def ours(model: Any, sampling: Sampling | None = None, **options: Any) -> list[list[int]]:
    """Return the engine's texts of both prompts in one batch, drafted where `truth` helps."""
    truth = options.pop("truth", None)
    drafter = None
    if truth is not None:
        drafter = NoisyTrees(dict(zip(map(tuple, PROMPTS), truth, strict=True)))
    engine = Engine(model, drafter=drafter, budget=6)
    results = engine.generate(PROMPTS, sampling, max_new_tokens=NEW, **options)
    if drafter is not None:
        assert sum(result.report.accepted for result in results) > 0
    return [result.tokens for result in results]


@pytest.mark.parametrize("name", HONOURED)
def test_greedy_text_under_each_setting_equals_that_of_transformers(name: str) -> None:
    """The setting is the model's or, if a call may have it, the call's."""
    settings = greedy()[name]
    of_a_call = {each.name for each in fields(Sampling)} | {"eos_token_id", "pad_token_id"}
    model = model_that_asks(**settings)
    expected = theirs(model)
    assert expected != plain() or name == "forced_bos_token_id"
    assert ours(model) == expected
    assert ours(model, truth=expected) == expected
    assert ours(model, ignore_defaults=True, ignore_eos=True) == plain()
    if settings.keys() <= of_a_call:
        ends = settings.pop("eos_token_id", ())
        settings.pop("pad_token_id", None)
        assert ours(model_that_asks(), Sampling(**settings), stop_token_ids=ends) == expected


# Processors of the caller in place of settings, of the first text of `plain`.
REPLACED: dict[str, Any] = {
    "sequence_bias": lambda _: hf.SequenceBiasLogitsProcessor({(n,): 1.0 for n in range(0, 90, 2)}),
    "repetition_penalty": lambda _: hf.RepetitionPenaltyLogitsProcessor(1.1),
    "bad_words_ids": lambda one: hf.NoBadWordsLogitsProcessor([one[:1]]),
    "min_length": lambda one: hf.MinLengthLogitsProcessor(8, one[2]),
    "suppress_tokens": lambda one: hf.SuppressTokensLogitsProcessor(one[:1]),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_processor_of_the_caller_replaces_the_setting_of_its_class(name: str) -> None:
    model = model_that_asks(**{"repetition_penalty": 1.5, **greedy()[name]})
    processors = [REPLACED[name](plain()[0])]
    expected = theirs(model, logits_processor=processors)
    assert ours(model, logits_processor=processors) == expected != theirs(model)


@pytest.mark.parametrize("prompt", [[5], [5, 6, 7]])
def test_forced_first_tokens_and_suppressed_tokens_after_them(prompt: list[int]) -> None:
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
def test_settings_that_the_bridge_alone_applies_are_refused_by_name(name: str) -> None:
    model = model_that_asks(**greedy()[name])
    with pytest.raises(InputError, match=name.split(",")[0]):
        ours(model)
    assert ours(model, ignore_defaults=True) == plain()


OTHER = re.findall(
    r"\w+",
    """typical_p epsilon_cutoff eta_cutoff top_h num_beams num_beam_groups diversity_penalty
    penalty_alpha dola_layers constraints force_words_ids token_healing max_time guidance_scale
    watermarking_config assistant_ensemble_weight""",
)
# Outputs, caches, compilation, drafts, ids that are never read, and how beams are ranked.
HARMLESS = re.findall(
    r"\w+",
    """output_attentions output_hidden_states output_logits output_scores use_cache use_mtp
    return_dict_in_generate cache_config cache_implementation compile_config disable_compile
    low_memory continuous_batching_config max_cache_len prefill_chunk_size is_assistant
    assistant_confidence_threshold assistant_early_exit assistant_lookbehind bos_token_id
    max_matching_ngram_size num_assistant_tokens num_assistant_tokens_schedule early_stopping
    prompt_lookup_num_tokens speculation_type target_lookbehind decoder_start_token_id pad_token_id
    length_penalty renormalize_logits _from_model_config transformers_version""",
)
FOLLOWED = {"do_sample", "num_return_sequences", "eos_token_id", "stop_strings", "max_new_tokens"}


def test_every_setting_of_a_config_is_followed_refused_or_harmless() -> None:
    followed = {*HONOURED, *SAMPLED, *FOLLOWED, "max_length"} - {"several", "several, normalized"}
    assert {*vars(GenerationConfig())} == (followed - {*OTHER}) | {*OTHER, *HARMLESS}


@pytest.mark.parametrize("name", OTHER)
def test_a_config_of_another_search_or_filter_is_refused_by_name(name: str) -> None:
    config = GenerationConfig(do_sample=True)
    setattr(config, name, 2 if name.startswith("num_beam") else 0.4)
    with pytest.raises(SamplingError, match=f"{name}=.* cannot apply; expected none of it"):
        Sampling.from_generation_config(config)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_harmless_setting_of_a_config_changes_no_text(name: str) -> None:
    config = GenerationConfig(pad_token_id=PAD)
    setattr(config, name, 5)
    assert ours(model_that_asks(), Sampling.from_generation_config(config)) == plain()


def test_the_length_of_a_config_is_that_of_transformers() -> None:
    engine = Engine(model_that_asks(), drafter=None)

    def length(prompt: list[int], **lengths: int) -> int:
        sampling = Sampling.from_generation_config(GenerationConfig(**lengths))
        return len(engine.generate(prompt, sampling).tokens)

    assert length(PROMPTS[0], max_new_tokens=3, max_length=50) == 3
    assert [length(prompt, max_length=9) for prompt in PROMPTS] == [3, 6]
    limit = engine.target.max_length
    assert limit is not None
    assert length([5] * (limit - 4), max_length=limit + 9) == 4
    with pytest.raises(PromptTooLongError, match=r"6 tokens .* max_length=6, which counts them"):
        length(PROMPTS[0], max_length=6)
    engine.model.generation_config.max_new_tokens = 4
    assert length(PROMPTS[0]) == 4


def test_all_of_a_config_is_followed_on_a_model_that_has_another() -> None:
    one, two = plain()
    config = GenerationConfig(repetition_penalty=1.2, suppress_tokens=[one[4]], min_length=9)
    rest = {"no_repeat_ngram_size": 1, "eos_token_id": [one[2], two[2]]}
    model = model_that_asks(suppress_tokens=[one[0]], **rest)
    expected = theirs(model, generation_config=config)
    assert expected == theirs(model_that_asks(), **rest, **config.to_diff_dict()) != plain()
    assert ours(model, Sampling.from_generation_config(config)) == expected
    engine = Engine(model_that_asks(), tiny.tokenizer(), drafter=None)
    stops = GenerationConfig(stop_strings=[tiny.tokenizer().decode(one[3:5])])
    stopped = engine.generate(PROMPTS[0], Sampling.from_generation_config(stops))
    assert (stopped.tokens, stopped.finish_reason) == (one[:5], "stop")
    drawn = Sampling.from_generation_config(GenerationConfig(do_sample=True))
    assert (drawn.temperature, drawn.top_k) == (1.0, 50), "the defaults of transformers' generate"


def test_numbers_of_arrays_are_numbers_and_those_out_of_range_are_named() -> None:
    sampling = Sampling(np.float32(0.5), np.int64(5), torch.tensor(0.75), n=np.int32(2))  # type: ignore[arg-type]
    assert sampling == Sampling(0.5, 5, 0.75, n=2)
    assert Sampling(seed=torch.tensor(3)) == Sampling(seed=np.array(3)) == Sampling(seed=3)  # type: ignore[arg-type]
    assert Sampling(seed=torch.tensor([3, 4])).seed_of(1) == 4  # type: ignore[arg-type]
    with pytest.raises(SamplingError, match=r"top_k is -1, .* 0 is off"):
        Sampling(top_k=-1)
    with pytest.raises(SamplingError, match="repetition_penalty is -1"):
        ours(model_that_asks(repetition_penalty=-1.0))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(0.9, logit_bias={7: 1.37}, frequency_penalty=0.7, top_p=0.9, seed=2),
        Sampling(logit_bias={token: 100 + token / 100 for token in range(96)}),
        Sampling(sequence_bias={(3,): 1.37, (3, 5): 2.22}, bad_words_ids=[[7], [8, 9]]),
    ],
)
def test_the_default_dtype_changes_no_score(kind: torch.dtype, sampling: Sampling) -> None:
    request: dict[str, Any] = {"max_new_tokens": NEW, "logprobs": 1}
    for static in ("off", "eager"):
        expected, result = list[Any](), list[Any]()
        for default, outcomes in ((torch.float32, expected), (kind, result)):
            engine = Engine(open_target(tiny.model("llama"), static), drafter=None)
            torch.set_default_dtype(default)
            try:
                outcomes += engine.generate(PROMPTS, sampling, **request)
            finally:
                torch.set_default_dtype(torch.float32)
        assert [each.logprobs for each in result] == [each.logprobs for each in expected]


def test_sampling_replaces_searches_and_filters_of_the_config() -> None:
    request: dict[str, Any] = {"do_sample": True, "num_beams": 3}
    for settings in SAMPLED.values():
        request |= settings
    assert ours(model_that_asks(**request)) == plain()
    sampling = Sampling(temperature=0.8, seed=3)
    assert ours(model_that_asks(**request), sampling) == ours(model_that_asks(), sampling)


def test_settings_of_the_call_override_those_of_the_model() -> None:
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
    assert mild.with_defaults(None) == mild


def test_ids_beyond_the_vocabulary_are_ignored_in_configs() -> None:
    one, two = plain()
    model = model_that_asks(
        suppress_tokens=[one[2], 10**6, -1],
        begin_suppress_tokens=[two[0], 10**6],
        eos_token_id=[one[5], 10**6],
        min_new_tokens=5,
        min_length=NEW + 6,
    )
    assert ours(model) == theirs(model) != plain()


def test_values_of_a_config_without_effect_are_accepted() -> None:
    off: dict[str, Any] = {"guidance_scale": 1.0, "token_healing": False, "num_beams": 1}
    off |= {"num_beam_groups": 1, "diversity_penalty": 0.0, "penalty_alpha": 0.0}
    off |= {"typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0}
    config = GenerationConfig(do_sample=True, **off)
    assert Sampling.from_generation_config(config).with_defaults(config).temperature == 1.0


def test_a_model_without_a_config_adds_no_processors() -> None:
    assert default_processors(None, torch.tensor([[1, 2]]), 9, [3], 97) == {}
    assert Sampling().with_defaults(None) == Sampling()
    config = tiny.model("llama").generation_config
    assert default_processors(config, torch.tensor([[1, 2]]), 9, [3], 97) == {}


def test_margins_include_the_settings_of_the_model() -> None:
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
