"""Models outside the scope are refused by name, with the reason, before any work."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from ragspec.engine.engine import Engine
from ragspec.errors import ModelError, TokenizerMismatchError, UnsupportedModelError
from ragspec.models.supported import (
    AttentionWindow,
    check_config,
    check_scope,
    foreign_layers,
    layer_windows,
    state_layers,
    unwrapped,
)
from ragspec.models.vocabulary import check_vocabulary
from tests.support import architectures, tiny
from tests.support.architectures import COMMON, build

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
REASONS = {
    "encoder-decoder": ("t5", "bart", "whisper", "marian"),
    "is an encoder": ("bert", "roberta", "electra"),
    "forgets what its attention mask still shows": ("moshi",),
    "recurrent": ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"),
}


@pytest.mark.parametrize(
    ("model_type", "reason"), [(kind, why) for why, kinds in REASONS.items() for kind in kinds]
)
def test_configurations_outside_the_scope_are_refused_by_name(model_type: str, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        check_config(AutoConfig.for_model(model_type))
    message = str(caught.value)
    assert model_type in message
    assert "Use a decoder-only model" in message
    assert isinstance(caught.value, ModelError)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    "name", ["llama", "gpt_neox", "gpt2", "jamba", "falcon_h1", "gemma3", "lfm2", "bert"]
)
def test_decoders_and_hybrids_with_attention_pass(name: str) -> None:
    settings = {"is_decoder": True} | SMALL if name == "bert" else {}
    check_config(AutoConfig.for_model(name, **settings))


def test_a_hybrid_without_its_attention_layers_is_refused() -> None:
    config = AutoConfig.for_model("qwen3_next", layer_types=["linear_attention"] * 2, **SMALL)
    with pytest.raises(UnsupportedModelError, match="without any attention layer"):
        check_config(config)


def test_a_model_without_a_head_or_a_cache_is_refused() -> None:
    body = AutoModel.from_config(AutoConfig.for_model("llama", **COMMON))
    config = AutoConfig.for_model("openai-gpt", n_embd=32, n_layer=1, n_head=4, vocab_size=97)
    forgetful = AutoModelForCausalLM.from_config(config)
    for model, message in ((body, r"LlamaModel.*AutoModelForCausalLM"), (forgetful, "no cache of")):
        with pytest.raises(UnsupportedModelError, match=message):
            check_scope(model)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), "gpt2", None, SimpleNamespace(config=1)])
def test_objects_other_than_transformers_models_are_refused(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match="no transformers model"):
        check_scope(thing)


def test_an_adapter_of_virtual_tokens_is_refused_and_others_are_not() -> None:
    model = copy.copy(build("llama"))
    model.active_peft_config = SimpleNamespace(is_prompt_learning=True)
    with pytest.raises(UnsupportedModelError, match=r"virtual tokens.*such as LoRA, works"):
        check_scope(model)
    model.active_peft_config = SimpleNamespace(is_prompt_learning=False)
    check_scope(model)


def test_layers_that_keep_a_state_or_more_than_keys_and_values_are_named() -> None:
    for name in ("llama", "gemma3_text"):
        assert foreign_layers(build(name).config) == state_layers(build(name).config) == set()
    assert foreign_layers(build("qwen3_5_text").config) == {"LinearAttentionLayer"}
    assert state_layers(build("qwen3_5_text").config) == {"linear_attention"}
    assert foreign_layers(SimpleNamespace()) == set(), "of a configuration that says nothing"


def test_a_compiled_model_generates_the_same_text() -> None:
    model = copy.deepcopy(build("llama"))
    text = [1, 2, 3, 1, 2, 3, 1, 2]
    expected = Engine(model, drafter=None).generate(text, max_new_tokens=8).tokens
    compiled = torch.compile(model, backend="eager")
    assert unwrapped(compiled) is model
    engine = Engine(compiled, drafter="context", budget=4)
    assert engine.model is compiled
    assert engine.generate(text, max_new_tokens=8).tokens == expected
    model.train()
    with pytest.raises(ModelError, match="training mode"):
        engine.generate(text, max_new_tokens=8)


def test_adapter_wrappers_are_unwrapped() -> None:
    model = build("llama")
    assert unwrapped(SimpleNamespace(get_base_model=lambda: model)) is model
    assert unwrapped(model) is model


FULL = {"full_attention": AttentionWindow()}
WINDOWED = {"full_attention": AttentionWindow(size=8)}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", FULL),
        ("mistral", WINDOWED),  # one kind, whatever its window
        ("gpt2", FULL),
        ("gemma3_text", {"sliding_attention": AttentionWindow(size=8)} | FULL),
        ("llama4_text", {"chunked_attention": AttentionWindow(chunk=8)} | FULL),
    ],
)
def test_configurations_of_models(name: str, expected: dict[str, AttentionWindow]) -> None:
    assert layer_windows(architectures.build(name).config) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sliding_window": 8, "use_sliding_window": False}, FULL),
        ({"sliding_window": 8, "use_sliding_window": True}, WINDOWED),
        ({"sliding_window": 0}, FULL),
        ({"sliding_window": None, "layer_types": None}, FULL),
        ({"sliding_window": 8, "layer_types": ["full_attention"]}, FULL),
        (
            {"layer_types": ["recurrent", "sliding_attention", "recurrent"], "sliding_window": 4},
            {"recurrent": AttentionWindow(), "sliding_attention": AttentionWindow(size=4)},
        ),
    ],
)
def test_windows_that_are_switched_off_or_of_other_layers(
    settings: dict[str, Any], expected: dict[str, AttentionWindow]
) -> None:
    text = SimpleNamespace(**settings)
    assert layer_windows(SimpleNamespace(get_text_config=lambda: text)) == expected


def test_a_window_counts_the_query_itself_and_a_chunk_begins_again() -> None:
    places = torch.arange(6)
    reached = AttentionWindow(size=3).reaches(places[:, None], places[None])
    assert [int(row.nonzero().min()) for row in reached] == [0, 0, 0, 1, 2, 3]
    reached = AttentionWindow(chunk=4).reaches(places[:, None], places[None])
    assert reached[3].nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert reached[4].nonzero().flatten().tolist() == [4, 5]


def test_windows_and_chunks_combine() -> None:
    assert AttentionWindow().plain
    assert not AttentionWindow(size=2).plain and not AttentionWindow(chunk=2).plain
    both = AttentionWindow(size=2, chunk=4).reaches(torch.tensor(5), torch.arange(8))
    assert both.nonzero().flatten().tolist() == [4, 5, 6, 7]  # causality is not its business
    assert bool(AttentionWindow().reaches(torch.tensor(5), torch.arange(8)).all())


def test_vocabularies_that_agree_pass() -> None:
    tokenizer = tiny.tokenizer()
    check_vocabulary(tokenizer, tiny.tokenizer(chat=True), 97, 97)
    check_vocabulary(tokenizer, tokenizer, 97, 128)
    check_vocabulary(None, None, 97, 97)


def test_vocabularies_that_differ_are_refused() -> None:
    with pytest.raises(TokenizerMismatchError, match=r"id \d+ is .* in the draft.*expected one"):
        check_vocabulary(tiny.tokenizer(), tiny.bpe_tokenizer(), 97, 320)
    with pytest.raises(TokenizerMismatchError, match="128 token ids and the target 97"):
        check_vocabulary(tiny.tokenizer(), None, 97, 128)
