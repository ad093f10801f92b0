"""Folders of image generators: their parts, damaged files, models that do not fit."""

import json
from pathlib import Path

import pytest
import torch

from ragspec import errors
from ragspec.visual.families.llamagen import LlamaGen, caption_encoder
from ragspec.visual.loading import class_labels, find_folder
from ragspec.visual.models.captions import CaptionEncoder
from tests.support import tiny_images


def test_the_parts_of_a_folder_are_detected(folder: Path) -> None:
    result = find_folder(folder)
    assert result.target == folder / "target" and result.draft == folder / "draft"
    assert result.tokenizer == folder / "tokenizer" and result.head is None
    itself = find_folder(folder / "target")
    assert itself.target == folder / "target"
    assert itself.tokenizer == folder / "tokenizer"


def test_sets_lack_a_tokenizer_or_share_that_beside_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "target").symlink_to(folder / "target")
    with pytest.raises(errors.MissingModelError, match="tokenizer=PATH"):
        LlamaGen.load(find_folder(tmp_path / "set"), torch.device("cpu"), "auto", {})
    (tmp_path / "tokenizer").symlink_to(folder / "tokenizer")
    result = find_folder(tmp_path / "set")
    assert result.tokenizer == tmp_path / "tokenizer" and result.draft is None


def test_a_missing_model_says_what_was_tried(tmp_path: Path) -> None:
    absent = ((tmp_path, "holds neither config"), (tmp_path / "absent", "is no folder"))
    for name, message in (("tile", "Did you mean 'tiles'"), *absent):
        with pytest.raises(errors.MissingModelError, match=message):
            find_folder(name)
    with pytest.raises(errors.MissingModelError, match=r"holds no config\.json"):
        LlamaGen.load_model(tmp_path)


def test_a_damaged_model_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "target" / "config.json").read_text(encoding="utf-8"))
    whole = (folder / "target" / "model.safetensors").read_bytes()
    cases: list[tuple[dict[str, object], bytes | None, str]] = [
        *(({}, weights, "does not load") for weights in (None, b"damaged")),
        ({"num_classes": "x"}, whole, "does not load"),
        ({"id2label": [1]}, whole, "does not load"),
        ({"num_hidden_layers": 3}, whole, "lacks the weights"),
    ]
    for changes, weights, message in cases:
        (tmp_path / "config.json").write_text(json.dumps(config | changes), encoding="utf-8")
        if weights is not None:
            (tmp_path / "model.safetensors").write_bytes(weights)
        with pytest.raises(errors.ModelError, match=message):
            LlamaGen.load_model(tmp_path)


@pytest.mark.parametrize(
    "config", [{"model_type": "llama"}, {"_class_name": "VQModel"}, {"kind": "feature-head"}]
)
def test_a_folder_of_another_kind_of_model_is_named(config: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (kind,) = config.values()
    message = f"is a '{kind}' model; expected 'llamagen'"
    with pytest.raises(errors.UnsupportedModelError, match=message):
        LlamaGen.load_model(tmp_path)


def test_models_and_tokenizers_of_other_codes_are_refused() -> None:
    family = LlamaGen(tiny_images.model(), tiny_images.tokenizer())
    assert family.check_draft(tiny_images.model(layers=1)) and not family.check_draft("a model")
    other = {
        "vocab_size 30": tiny_images.model(codes=30),
        "condition 'features'": tiny_images.model("features"),
        "num_classes 2": tiny_images.model(num_classes=2, id2label=None),
    }
    for message, draft in other.items():
        with pytest.raises(errors.TokenizerMismatchError, match=message):
            family.check_draft(draft)


def test_class_names_are_read_from_the_configuration() -> None:
    instance = tiny_images.model()
    assert class_labels(instance.config.to_dict()) == tiny_images.CLASSES
    instance.config.id2label = {n: f"LABEL_{n}" for n in range(3)}
    assert class_labels(instance.config.to_dict()) == ()
    assert class_labels(tiny_images.model("features").config.to_dict()) is None


def test_the_bundled_encoder_is_for_models_of_its_width() -> None:
    instance = tiny_images.model("features")
    encoder = caption_encoder(instance)
    assert isinstance(encoder, CaptionEncoder)
    assert encoder.length == instance.config.condition_length
    instance.config.caption_dim = 2048
    assert caption_encoder(instance) is None
    assert caption_encoder(tiny_images.model()) is None
