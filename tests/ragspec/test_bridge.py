"""`model.generate` returns the same text with speculation, or refuses the arguments."""

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import transformers

from ragspec.bridge import Speculation, _settings, generate, speculative
from ragspec.errors import InputError, PromptTooLongError, UnsupportedModelError
from tests.support import tiny
from tests.support.generation_settings import PROMPTS, padded

IDS = torch.tensor(PROMPTS[:1])
NEW = 12


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.model("llama")


@pytest.fixture(scope="module")
def spec() -> Speculation:
    return Speculation(drafter=None, tokenizer=tiny.tokenizer(), seed=1)


def both(model: Any, spec: Speculation, **arguments: Any) -> tuple[Any, Any]:
    arguments = {"max_new_tokens": NEW, "do_sample": False, **arguments}
    theirs = model.generate(**arguments)
    arguments.pop("tokenizer", None)
    return generate(model, speculation=spec, **arguments), theirs


GREEDY: dict[str, dict[str, Any]] = {
    "plain": {"input_ids": IDS},
    "left padding": padded(PROMPTS),
    "penalties": {"input_ids": IDS, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
    "least": {"input_ids": IDS, "min_new_tokens": 8, "eos_token_id": [9, 80, 66]},
    "ends of this call": {**padded(PROMPTS), "eos_token_id": [80, 93], "pad_token_id": 0},
    "no end": {"input_ids": IDS, "eos_token_id": None, "pad_token_id": 0},
    "length": {"input_ids": IDS, "max_new_tokens": None, "max_length": 11},
}


@pytest.mark.parametrize("name", GREEDY)
def test_greedy_texts_are_those_of_transformers(name: str, model: Any, spec: Speculation) -> None:
    ours, theirs = both(model, spec, **GREEDY[name])
    assert torch.equal(ours, theirs)
    assert len(spec.reports) == len(ours)


def test_custom_generate_works_without_the_generate_wrapper(model: Any) -> None:
    spec, settings = Speculation(drafter="context", budget=4), {"max_new_tokens": NEW}
    ours = model.generate(IDS, custom_generate=speculative, speculation=spec, **settings)
    assert torch.equal(ours, model.generate(IDS, **settings))
    assert spec.generations[0].tokens == ours[0, 6:].tolist()


def test_several_sequences_of_each_prompt(model: Any, spec: Speculation) -> None:
    settings: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 5}
    ours = generate(model, speculation=spec, **padded(PROMPTS), **settings, num_return_sequences=3)
    assert [generation.sample for generation in spec.generations] == [0, 1, 2] * 2
    prompts = [generation.prompt_tokens for generation in spec.generations]
    assert prompts == [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3
    assert torch.equal(ours[:, :6], padded(PROMPTS)["input_ids"].repeat_interleave(3, 0))
    assert len({tuple(row) for row in ours[:3].tolist()}) == 3
    again = generate(model, speculation=spec, **padded(PROMPTS), **settings, num_return_sequences=3)
    assert torch.equal(ours, again)


def test_filters_become_settings_only_where_the_order_is_ours() -> None:
    config = transformers.GenerationConfig(do_sample=True)
    usual = [
        transformers.RepetitionPenaltyLogitsProcessor(1.2),
        transformers.TemperatureLogitsWarper(0.5),
        transformers.TopKLogitsWarper(4),
        transformers.TopPLogitsWarper(0.9),
    ]
    sampling, rest = _settings(config, usual, 3)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 4, 0.9)
    assert rest == usual[:1]
    turned = [transformers.TopPLogitsWarper(0.9), transformers.TemperatureLogitsWarper(0.5)]
    sampling, rest = _settings(config, turned, 3)
    assert (sampling.temperature, sampling.top_p, rest) == (0.5, 1.0, turned[:1])
    careful = [transformers.TopPLogitsWarper(0.9, min_tokens_to_keep=2)]
    sampling, rest = _settings(config, careful, 3)
    assert (sampling.temperature, sampling.top_p, rest) == (1.0, 1.0, careful)


def test_return_dict_in_generate_returns_transformers_output(model: Any, spec: Speculation) -> None:
    ours, theirs = both(model, spec, input_ids=IDS, return_dict_in_generate=True)
    assert type(ours) is type(theirs)
    assert torch.equal(ours.sequences, theirs.sequences)


@pytest.mark.parametrize("place", ["config", "model", "both"])
def test_stop_strings_of_a_config(place: str, model: Any, spec: Speculation) -> None:
    tokenizer = tiny.tokenizer()
    settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
    whole = model.generate(IDS, **settings)
    text = tokenizer.decode(whole[0, 6:])
    arguments: dict[str, Any] = {"input_ids": IDS, "tokenizer": tokenizer, **settings}
    if place != "config":
        model = copy.deepcopy(model)
        model.generation_config.stop_strings = [text[4:6] if place == "model" else text[0]]
    if place != "model":
        config = transformers.GenerationConfig(stop_strings=[text[4:6]], **settings)
        arguments = {"input_ids": IDS, "tokenizer": tokenizer, "generation_config": config}
    selected = copy.deepcopy((model.generation_config, arguments.get("generation_config")))
    ours = generate(model, speculation=spec, **arguments)
    assert torch.equal(ours, model.generate(**arguments))
    assert 8 <= ours.shape[1] < whole.shape[1]
    assert (model.generation_config, arguments.get("generation_config")) == selected
    with pytest.raises(InputError, match="tokenizer"):
        generate(model, speculation=Speculation(drafter=None), **arguments | {"tokenizer": None})


def test_a_streamer_gets_the_text(model: Any, spec: Speculation) -> None:
    tokenizer = tiny.tokenizer()
    streamer = transformers.TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=30)
    arguments = {"max_new_tokens": NEW, "do_sample": False, "streamer": streamer}
    with ThreadPoolExecutor() as pool:
        call = pool.submit(generate, model, IDS, speculation=spec, **arguments)
        text = "".join(streamer)
        call.result()
    assert text == tokenizer.decode(spec.generations[0].tokens)
    with pytest.raises(InputError, match="one"):
        generate(model, **padded(PROMPTS), speculation=spec, streamer=streamer, max_new_tokens=2)


def test_a_refused_call_ends_its_stream(model: Any) -> None:
    calls: list[dict[str, Any]] = [{"num_beams": 2}, {"foo": 1}, {"stop_strings": "x"}]
    for call in calls:
        streamer = transformers.TextIteratorStreamer(tiny.tokenizer(), timeout=5)
        with pytest.raises(ValueError, match=r"beams|foo|tokenizer"):
            generate(model, IDS, streamer=streamer, max_new_tokens=2, **call)
        assert list(streamer) == [""]


@pytest.mark.parametrize("kind", ["default", "linear"])
def test_texts_may_be_longer_than_the_context_of_a_rotary_model(kind: str, model: Any) -> None:
    torch.manual_seed(0)
    config = copy.deepcopy(model.config)
    config.max_position_embeddings = 16
    config.rope_parameters = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    short = type(model)(config).eval()
    ours, theirs = both(short, Speculation(drafter="context", budget=4), input_ids=IDS)
    assert torch.equal(ours, theirs) and ours.shape[1] > 16
    config.rope_parameters["rope_type"], config.max_position_embeddings = "dynamic", 40
    short = type(model)(config).eval()
    with pytest.raises(PromptTooLongError, match=r"rope_type='dynamic' and a context of 40; .* no"):
        generate(short, IDS, max_new_tokens=41)


def test_tokens_are_healed(model: Any) -> None:
    tokens = copy.deepcopy(tiny.tokenizer())
    tokens.bos_token, tokens.pad_token = "Y", "Z"
    ids = tokens("hello wor", return_tensors="pt")["input_ids"]
    call = {"token_healing": True, "tokenizer": tokens, "max_new_tokens": 5, "do_sample": False}
    assert torch.equal(generate(model, ids, **call), model.generate(ids, **call))


def test_a_seed_of_torch_repeats_a_sampled_text(model: Any) -> None:
    def drawn() -> list[list[int]]:
        return [generate(model, IDS, max_new_tokens=NEW, do_sample=True).tolist() for _ in "ab"]

    torch.manual_seed(3)
    first = drawn()
    torch.manual_seed(3)
    assert drawn() == first and first[0] != first[1]


def test_unsupported_arguments_are_refused(model: Any, spec: Speculation) -> None:
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(IDS[:, :-1], past_key_values=cache)
    calls: list[tuple[str, dict[str, Any]]] = [
        ("inputs_embeds", {"input_ids": None, "inputs_embeds": torch.zeros(1, 3, 64)}),
        ("num_beams=2", {"num_beams": 2}),
        ("prompt_lookup_num_tokens=3", {"prompt_lookup_num_tokens": 3}),
        ("penalty_alpha=0.6", {"penalty_alpha": 0.6, "top_k": 4}),
        ("dola_layers='low'", {"dola_layers": "low", "do_sample": False}),
        (r"dola_layers=\[0\]", {"dola_layers": [0], "do_sample": False}),
        ("force_words_ids", {"force_words_ids": [[5]]}),
        ("constraints", {"constraints": [5]}),
        ("output_scores", {"return_dict_in_generate": True, "output_scores": True}),
        ("padded on the right", {"attention_mask": (IDS != 5).long()}),
        ("with tokens", {"past_key_values": cache}),
    ]
    for match, call in calls:
        with pytest.raises(InputError, match=match):
            generate(model, speculation=spec, **{"input_ids": IDS, "max_new_tokens": 2, **call})
    with pytest.raises(InputError, match="expected a Speculation"):
        model.generate(IDS, custom_generate=speculative, speculation=5, max_new_tokens=2)


def test_unsupported_models_are_refused_by_their_names(model: Any) -> None:
    peft = pytest.importorskip("peft")
    task = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    tuned = peft.get_peft_model(copy.deepcopy(model), task)
    for each, match in (tuned, "virtual tokens"), (tiny.model("mamba"), "mamba cannot be used"):
        with pytest.raises(UnsupportedModelError, match=match):
            generate(each, input_ids=IDS, max_new_tokens=2)


def test_the_engine_is_reused_until_a_field_changes(model: Any) -> None:
    spec = Speculation(drafter="context", budget=4)
    generate(model, IDS, speculation=spec, max_new_tokens=2)
    first = spec.engine(model)
    generate(model, IDS, speculation=spec, max_new_tokens=2)
    assert spec.engine(model) is first
    spec.budget = 0
    assert spec.engine(model) is not first
    assert spec.engine(tiny.model("llama", seed=1)).model is not model


def test_an_assistant_of_a_later_call_is_used(model: Any) -> None:
    spec = Speculation(drafter=None, budget=4)
    both(model, spec, input_ids=IDS)
    assert spec.reports[0].drafted == 0
    ours = generate(model, IDS, speculation=spec, assistant_model=model, max_new_tokens=6)
    assert spec.reports[0].drafted > 0
    assert torch.equal(ours, model.generate(IDS, max_new_tokens=6))
