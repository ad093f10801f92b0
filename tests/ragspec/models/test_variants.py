"""Models with an adapter's weights or in fewer bits: drafted and plain text stay equal."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.engine.engine import Engine
from ragspec.errors import (
    InputError,
    MissingExtraError,
    ModelError,
    ModelNotFoundError,
    UnknownNameError,
)
from ragspec.models import load
from ragspec.models.load import load_model
from ragspec.pipelines.cli.app import main
from tests.support import tiny
from tests.support.noisy import NoisyTrees


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny.model().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


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


def test_an_adapter_that_does_not_fit_is_refused(
    saved: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelNotFoundError, match=r"expected a folder with adapter_config\.json"):
        load_model(saved, adapter=tmp_path)
    other = tiny.model(vocab_size=50, hidden_size=32)
    with pytest.raises(ModelError, match="cannot be merged"):
        load.with_adapter(copy.deepcopy(other), adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": ["none"]}))
    with pytest.raises(ModelError, match="cannot be merged"):
        load_model(saved, adapter=adapter)
    monkeypatch.setattr(load, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"ragspec\[adapters\]"):
        load_model(saved, adapter=adapter)
    with pytest.raises(MissingExtraError, match=r"ragspec\[int8\]"):
        load_model(saved, quantize="int8")


def test_weights_in_eight_bits(saved: Path) -> None:
    pytest.importorskip("torchao")
    model, _ = load_model(saved, "cpu", "float32", quantize="int8")
    assert "Int8" in type(model.model.layers[0].mlp.up_proj.weight).__name__
    drafted_equals_plain(model)


def test_the_command_line_works_in_eight_bits(saved: Path) -> None:
    """With torchao from the folder where the set-up puts it, which no other test should import."""
    beside = Path(sys.prefix) / "beside"
    if not (beside / "torchao").is_dir():
        pytest.skip("no torchao beside the environment: python3 dev.py setup brings it")
    run = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "8", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "ragspec", *run, "--quantize", "int8", "--compare"],
        env=os.environ | {"PYTHONPATH": str(beside)},
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["text"] and said["compare"]["equal"]


def test_what_cannot_be_had_is_said(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean 'int8'"):
        load_model(saved, quantize="int")
    with pytest.raises(InputError, match="expected one of them"):
        load_model(saved, "cpu", device_map="auto")
    run = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "3"]
    assert main([*run, "--quantize", "int4"]) == 2
    assert main([*run, "--device", "cpu", "--device-map", "auto"]) == 2
    assert main([*run, "--device-map", "nonsense"]) == 2
    capsys.readouterr()


def test_a_spread_model_writes_the_same(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spread, _ = load_model(saved, dtype="float32", device_map={"": "cpu"})
    plain, _ = load_model(saved, "cpu", "float32")
    assert drafted_equals_plain(spread) == drafted_equals_plain(plain)
    run = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "3", "--json"]
    assert main([*run, "--device-map", "auto"]) == 0
    assert json.loads(capsys.readouterr().out)["text"]


def test_the_command_line_takes_an_adapter(
    saved: Path, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["generate", "Hello.", "--model", str(saved), "--max-new-tokens", "12", "--json"]
    texts = []
    for extra in ([], ["--adapter", str(adapter)]):
        assert main([*run, *extra]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] != texts[1]
