"""From a folder to a model and its tokenizer; damaged folders are named, not half loaded."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from ragspec.budget.policy import make_budget
from ragspec.engine.rows import model_identity, read_cost
from ragspec.errors import InputError, ModelError, ModelNotFoundError, UnsupportedModelError
from ragspec.models.load import load_model
from ragspec.verification.open import open_target
from tests.support import tiny


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy.deepcopy(tiny.model("llama")).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_a_folder_gives_model_and_tokenizer(folder: Path) -> None:
    model, tokenizer = load_model(folder, "cpu", "float64")
    assert model.dtype == torch.float64
    assert not model.training
    assert tokenizer("ab")["input_ids"] == [65, 66]
    ids = torch.tensor([[5, 6, 7]])
    expected = tiny.model("llama", dtype=torch.float64).state_dict()
    current = model.state_dict()
    with torch.no_grad():
        assert model(ids).logits.shape == (1, 3, 97)
    assert current.keys() == expected.keys()


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    copy.deepcopy(tiny.model("llama")).save_pretrained(tmp_path)
    assert load_model(tmp_path)[1] is None


def test_unknown_numbers_and_devices_are_no_fault_of_the_model(folder: Path) -> None:
    with pytest.raises(InputError, match="'int8' is unknown"):
        load_model(folder, "cpu", "int8")
    with pytest.raises(InputError, match="'cuda:99' cannot be used"):
        load_model(folder, "cuda:99")


@pytest.mark.parametrize("size", [20, 100, -50])
def test_cut_weights_are_refused(size: int, folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(ModelError, match="cannot load it as a causal language model"):
        load_model(folder)


def test_weights_that_are_missing_are_not_created_up(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks the weights model\.layers\.1\.mlp"):
        load_model(folder)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    tied = copy.deepcopy(tiny.model("llama", tie_word_embeddings=True))
    tied.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, "cpu")[0]
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, tied(ids).logits)


def test_a_damaged_tokenizer_is_refused_rather_than_left_out(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot load its tokenizer"):
        load_model(folder)


def test_a_folder_that_is_no_model(folder: Path) -> None:
    (folder / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="save_pretrained"):
        load_model(folder)
    with pytest.raises(ModelNotFoundError, match="Tried"):
        load_model(folder / "nowhere")


def test_a_target_is_opened_after_the_probe() -> None:
    target = open_target(tiny.model("llama"))
    assert target.vocab_size == tiny.VOCAB
    assert target.max_length == 512
    with pytest.raises(UnsupportedModelError):
        open_target(tiny.model("rwkv"))


def test_the_cost_is_measured_only_where_the_budget_needs_it(tmp_path: Path) -> None:
    target = open_target(tiny.model("llama"))
    assert read_cost(target, make_budget(8), tmp_path) is None


def test_the_identity_is_of_the_architecture_and_not_of_the_weights() -> None:
    first = model_identity(tiny.model("llama"))
    assert first == model_identity(tiny.model("llama", seed=1))
    assert first != model_identity(tiny.model("llama", dtype=torch.float64))
    assert first != model_identity(tiny.model("llama", num_hidden_layers=1))


def test_loading_shows_no_bars_and_leaves_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    logging.enable_progress_bar()
    load_model("starter", "cpu")
    text = capsys.readouterr()
    assert text.out == text.err == ""
    assert logging.is_progress_bar_enabled()
