"""From a folder to a model and its tokenizer; damaged folders are refused."""

import copy
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from ragspec import Engine, errors, load_model
from ragspec.models import load
from ragspec.models.device import input_device, pick_device, pick_dtype
from ragspec.pipelines.cli.app import main
from ragspec.verification.open import open_target
from tests.support import tiny
from tests.support.command_line import Capture, run
from tests.support.noisy import NoisyTrees


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(tiny.save(tmp_path / "model"))


def test_a_folder_gives_model_and_tokenizer_if_it_has_one(saved: Path) -> None:
    model, tokenizer = load_model(saved, "cpu", "float64")
    assert model.dtype == torch.float64
    assert not model.training
    assert tokenizer("ab")["input_ids"] == [65, 66]
    assert model(torch.tensor([[5, 6, 7]])).logits.shape == (1, 3, 97)
    assert model.state_dict().keys() == tiny.model("llama", dtype=torch.float64).state_dict().keys()
    (saved / "tokenizer.json").unlink()
    (saved / "tokenizer_config.json").unlink()
    assert load_model(saved)[1] is None


@pytest.mark.parametrize("size", [20, 100, -50])
def test_cut_weights_are_refused(size: int, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = saved / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(errors.ModelError, match="is damaged"):
        load_model(saved)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(errors.ModelError, match=r"Permission denied.*Change its permissions"):
        load_model(saved)


def test_missing_weights_and_an_embedder_are_refused(saved: Path) -> None:
    weights = load_file(saved / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, saved / "model.safetensors", {"format": "pt"})
    with pytest.raises(errors.ModelError, match=r"lacks the weights model\.layers\.1\.mlp"):
        load_model(saved)
    with pytest.raises(errors.ModelError, match="starter-embedder embeds text; expected a model"):
        load_model("starter-embedder")


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    tied = copy.deepcopy(tiny.model("llama", tie_word_embeddings=True))
    tied.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "cpu")[0]
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(loaded(ids).logits, tied(ids).logits)


CODE = {"AutoConfig": "code.C", "AutoModelForCausalLM": "code.M", "AutoTokenizer": ["code.T", None]}
CONFIGS: dict[str, dict[str, Any]] = {
    "expected int": {"hidden_size": "64"},
    "ZeroDivisionError": {"num_attention_heads": 0},
    "other sizes": {"vocab_size": 200},
    r"no model_type in it\)": {"model_type": ""},
    "GPTQ": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "model .*never runs": {"model_type": "custom", "auto_map": CODE},
}
OTHERS = {
    "tokenizer .*never runs": ("tokenizer_config.json", {"tokenizer_class": "T", "auto_map": CODE}),
    "cannot load its tokenizer": ("tokenizer.json", []),
    r"lacks a whole model\.safetensors\.index": ("model.safetensors.index.json", []),
    r"generation_config\.json cannot be used \(no object": ("generation_config.json", []),
    "damaged, or hold more than tensors": ("pytorch_model.bin", []),
    "no model_type in it.*save_pretrained": ("config.json", []),
}


@pytest.mark.parametrize("said", [*CONFIGS, *OTHERS])
def test_wrong_files_are_errors_and_their_code_does_not_run(
    said: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, change = OTHERS.get(said) or ("config.json", CONFIGS[said])
    path = saved / name
    if isinstance(change, dict):
        change = json.loads(path.read_text("utf-8")) | change
    path.write_text(json.dumps(change), encoding="utf-8")
    if path.suffix == ".bin":
        (saved / "model.safetensors").unlink()
    (saved / "code.py").write_text("raise SystemExit('it runs')", encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda _: "y")
    with pytest.raises(errors.ModelError, match=said):
        load_model(saved)


def test_a_target_is_opened_after_the_probe() -> None:
    target = open_target(tiny.model("llama"))
    assert target.vocab_size == tiny.VOCAB
    assert target.max_length == 512
    with pytest.raises(errors.UnsupportedModelError):
        open_target(tiny.model("rwkv"))


def test_loading_prints_no_progress_bar_and_keeps_the_setting(capsys: Capture) -> None:
    logging.enable_progress_bar()
    load_model("starter", "cpu")
    text = capsys.readouterr()
    assert text.out == text.err == ""
    assert logging.is_progress_bar_enabled()


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    peft.get_peft_model(copy.deepcopy(tiny.model()), config).save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


def drafted_equals_plain(model: Any) -> list[int]:
    prompt = tiny.prompt(20)
    plain = Engine(model, None, None).generate(prompt, max_new_tokens=20).tokens
    drafter = NoisyTrees({tuple(prompt): plain})
    result = Engine(model, None, drafter, budget=8).generate(prompt, max_new_tokens=20)
    assert result.tokens == plain and result.report.accepted > 4
    return list(plain)


def test_an_adapter_is_merged_and_changes_the_text(saved: Path, adapter: Path) -> None:
    model, _ = load_model(saved, "cpu", "float32", adapter=adapter)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert not any("lora" in name for name, _ in model.named_parameters())
    base, _ = load_model(saved, "cpu", "float32")
    assert drafted_equals_plain(model) != drafted_equals_plain(base)
    ids = torch.tensor([tiny.prompt(9)])
    peft = pytest.importorskip("peft")
    current = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
    assert torch.allclose(current(ids).logits, model(ids).logits, atol=1e-4)


TOKENS = {"trainable_token_indices": [3, 4]}
SEPARATE = {"trainable_token_indices": {"embed_tokens": [3], "lm_head": [5]}}


@pytest.mark.parametrize(
    ("kind", "targets", "tokens", "fits"),
    [("LoraConfig", ["q_proj", "embed_tokens"], {}, True), ("LoraConfig", ["lm_head"], {}, True)]
    + [("LoKrConfig", ["lm_head"], {}, True), ("LoraConfig", ["q_proj"], TOKENS, True)]
    + [("LoraConfig", ["q_proj"], SEPARATE, False), ("LoraConfig", ["lm_head"], TOKENS, False)],
)
def test_an_adapter_of_tied_embeddings_is_merged_or_refused(
    tmp_path: Path, kind: str, targets: Any, tokens: Any, fits: bool, recwarn: Any
) -> None:
    peft = pytest.importorskip("peft")
    base = copy.deepcopy(tiny.model("llama", tie_word_embeddings=True))
    base.save_pretrained(tmp_path / "base")
    init = "init_lora_weights" if kind == "LoraConfig" else "init_weights"
    config = getattr(peft, kind)(target_modules=targets, **tokens, **{init: False})
    adapted = peft.get_peft_model(base, config)
    for name, weight in adapted.named_parameters():
        weight.data += 0.1 * ("trainable_tokens_delta" in name)
    adapted.save_pretrained(tmp_path / "lora")
    recwarn.clear()
    if not fits:
        with pytest.raises(errors.ModelError, match="in more than one way"):
            load_model(tmp_path / "base", "cpu", "float32", adapter=tmp_path / "lora")
        return
    model, _ = load_model(tmp_path / "base", "cpu", "float32", adapter=tmp_path / "lora")
    assert not [each for each in recwarn if each.category is UserWarning], recwarn.list
    ids = torch.tensor([[3, 4, *tiny.prompt(9)]])
    assert torch.allclose(adapted.eval()(ids).logits, model(ids).logits, atol=1e-4)


def test_an_adapter_that_does_not_fit_is_refused(
    saved: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        errors.MissingModelError, match=r"expected a folder with adapter_config\.json"
    ):
        Engine.from_pretrained(str(saved), adapter=tmp_path)
    other = tiny.model(vocab_size=50, hidden_size=32)
    with pytest.raises(errors.ModelError, match="cannot be merged"):
        load.with_adapter(copy.deepcopy(other), adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    for part in (".self_attn.", "layers.1."):  # of all weights and of half of them
        renamed = {key.replace(part, f".other{part}"): each for key, each in weights.items()}
        save_file(renamed, adapter / "adapter_model.safetensors")
        with pytest.raises(errors.ModelError, match=r"cannot be merged.* differ in (8|16) weights"):
            load.with_adapter(copy.deepcopy(tiny.model()), adapter)
    deeper = {key.replace("layers.1", "layers.2"): each.clone() for key, each in weights.items()}
    save_file(weights | deeper, adapter / "adapter_model.safetensors")
    with pytest.raises(errors.ModelError, match=r"differ in .*layers"):
        load.with_adapter(copy.deepcopy(tiny.model()), adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["none"]}))
    with pytest.raises(errors.ModelError, match="cannot be merged"):
        load_model(saved, adapter=adapter)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(errors.MissingExtraError, match=r"ragspec\[adapters\]"):
        load_model(saved, adapter=adapter)


def test_conflicting_devices_and_unknown_dtypes_are_refused(saved: Path) -> None:
    with pytest.raises(errors.InputError, match=r"'int9' is unknown.*int8"):
        load_model(saved, "cpu", "int9")
    with pytest.raises(errors.InputError, match="'cuda:99' cannot be used"):
        load_model(saved, "cuda:99")
    with pytest.raises(errors.InputError, match="expected one of them"):
        load_model(saved, "cpu", device_map="auto")
    run = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "3"]
    assert main([*run, "-s", "dtype=int2"]) == 2
    assert main([*run, "-s", "device=cpu", "-s", "device-map=auto"]) == 2
    assert main([*run, "-s", "device-map=nonsense"]) == 2


def test_a_model_with_a_device_map_generates_the_same_text(saved: Path, capsys: Capture) -> None:
    spread, _ = load_model(saved, dtype="float32", device_map={"": "cpu"})
    plain, _ = load_model(saved, "cpu", "float32")
    assert drafted_equals_plain(spread) == drafted_equals_plain(plain)
    command = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "3"]
    assert run(capsys, *command, "-s", "device-map=auto")["text"]


def test_the_command_line_takes_an_adapter(saved: Path, adapter: Path, capsys: Capture) -> None:
    command = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "12"]
    adapted = run(capsys, *command, "-s", f"adapter={adapter}")
    assert run(capsys, *command)["text"] != adapted["text"]


CPU = torch.device("cpu")


def test_auto_is_the_accelerator_or_the_cpu() -> None:
    there = torch.accelerator.is_available()
    assert pick_device("auto") == (torch.accelerator.current_accelerator() if there else CPU)


def test_devices_by_name() -> None:
    assert pick_device("cpu") == CPU
    assert pick_device(torch.device("meta")) == torch.device("meta")
    refused = "cannot be used on this machine"
    wrong: list[Any] = ["cuda:99", "xpu:99", torch.device("cuda:99"), "warp", 99]
    for each in wrong:
        said = ".*expected 'auto'" if each in ("warp", 99) else refused
        with pytest.raises(errors.InputError, match=f"'{each}' ?{said}"):
            pick_device(each)


def test_ids_go_to_the_execution_device_of_an_offloaded_embedding() -> None:
    embedding = torch.nn.Embedding(2, 2, device="meta")
    assert input_device(embedding) == torch.device("meta")
    hook = SimpleNamespace(execution_device="cpu")
    for hung in (hook, SimpleNamespace(hooks=(SimpleNamespace(), hook))):
        embedding._hf_hook = hung  # type: ignore[assignment]
        assert input_device(embedding) == CPU
    embedding._hf_hook = SimpleNamespace(execution_device=None)  # type: ignore[assignment]
    assert input_device(embedding) == torch.device("meta")


def test_dtypes_by_name() -> None:
    assert pick_dtype("auto", CPU) == torch.float32
    assert pick_dtype("auto", torch.device("meta")) == "auto"
    assert pick_dtype("bf16", CPU) == pick_dtype("bfloat16", CPU) == torch.bfloat16
    assert pick_dtype(torch.float64, CPU) == torch.float64
    with pytest.raises(errors.InputError, match=r"'int8' is unknown.*float32"):
        pick_dtype("int8", CPU)
