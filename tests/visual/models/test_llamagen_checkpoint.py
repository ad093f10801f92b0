"""Checkpoints in the published layouts, written here from models of known weights."""

import argparse
import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.errors import InputError, ModelError
from ragspec.visual.models.llamagen_checkpoint import load_llamagen
from tests.support import image_models
from tests.support.damage import Change, with_one, with_value, without

SIZES: dict[str, Any] = {"grid_size": image_models.SIDE, "num_attention_heads": 2}


def published(model: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights by the names of the published files."""
    named = {
        "tok_embeddings.weight": model.embed_tokens.weight,
        "norm.weight": model.norm.weight,
        "output.weight": model.lm_head.weight,
    }
    if model.config.condition == "class":
        named["cls_embedding.embedding_table.weight"] = model.class_embedding.weight
    else:
        named["cls_embedding.cap_proj.fc1.weight"] = model.caption.fc1.weight
        named["cls_embedding.cap_proj.fc2.weight"] = model.caption.fc2.weight
        named["cls_embedding.uncond_embedding"] = model.caption.unconditional
    for i, layer in enumerate(model.layers):
        w1, w3 = layer.feed_forward.gate_up_proj.weight.chunk(2)
        named |= {
            f"layers.{i}.attention.wqkv.weight": layer.attention.qkv_proj.weight,
            f"layers.{i}.attention.wo.weight": layer.attention.o_proj.weight,
            f"layers.{i}.feed_forward.w1.weight": w1,
            f"layers.{i}.feed_forward.w2.weight": layer.feed_forward.down_proj.weight,
            f"layers.{i}.feed_forward.w3.weight": w3,
            f"layers.{i}.attention_norm.weight": layer.attention_norm.weight,
            f"layers.{i}.ffn_norm.weight": layer.ffn_norm.weight,
        }
    return {name: value.detach().clone().contiguous() for name, value in named.items()}


def check(result: Any, model: Any) -> None:
    """Check that a loaded model draws what the one it was written from draws."""
    ids = torch.arange(9)[None]
    with torch.no_grad():
        pair = [m(ids, condition_embeds=m.unconditional(1)).logits for m in (result, model)]
    assert torch.equal(*pair)
    weights = model.state_dict()
    assert result.state_dict().keys() == weights.keys()
    assert all(torch.equal(value, weights[name]) for name, value in result.state_dict().items())
    assert not result.training


@pytest.mark.parametrize("condition", ["class", "features"])
def test_weights_are_read_and_caches_left_out(condition: str, tmp_path: Path) -> None:
    model = image_models.model(condition)
    weights = published(model) | {"freqs_cis": torch.zeros(17, 4, 2)}
    weights |= {f"layers.0.attention.kv_cache.{kind}_cache": torch.zeros(2, 2) for kind in "kv"}
    torch.save({"model": OrderedDict(weights), "steps": 7}, tmp_path / "c.pt")
    check(load_llamagen(tmp_path / "c.pt", **SIZES), model)


def test_a_rotary_table_tells_grid_and_heads(tmp_path: Path) -> None:
    for condition, length in (("class", 1), ("features", 3)):
        model = image_models.model(condition)
        table = torch.zeros(length + image_models.SIDE**2, 4, 2)  # heads 8 wide
        torch.save({"model": published(model) | {"freqs_cis": table}}, tmp_path / "c.pt")
        check(load_llamagen(tmp_path / "c.pt"), model)


def test_the_settings_of_the_training_script_tell_the_grid(tmp_path: Path) -> None:
    model, file = image_models.model(), tmp_path / "c.pt"
    settings = argparse.Namespace(image_size=64, downsample_size=16, gpt_model="GPT-B")
    torch.save({"model": published(model), "args": settings}, file)
    check(load_llamagen(file, num_attention_heads=2), model)


def test_foreign_files_are_refused(tmp_path: Path) -> None:
    torch.save({"model": {"encoder.conv_in.weight": torch.zeros(2)}}, tmp_path / "c.pt")
    with pytest.raises(ModelError, match=r"holds encoder\.conv_in\.weight, and no embed_tokens"):
        load_llamagen(tmp_path / "c.pt")


NONE = r"c\.pt is no LlamaGen generator.* and no {}"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("output.weight"), NONE.format("lm_head.weight")),
        (without("layers.0.attention.wqkv.weight"), NONE.format("layers.0.attention.qkv_proj")),
        (with_one("tok_embeddings.weight", 16), NONE.format("embed_tokens.weight")),
        (with_one("tok_embeddings.weight", 24, 0), NONE.format("embed_tokens.weight")),
        (with_one("layers.0.attention.wqkv.weight", 16), NONE.format("layers.0.attention")),
        (without("layers.1.feed_forward.w3.weight"), r"also holds .*w1.*; it lacks .*gate_up"),
        (without("cls_embedding.embedding_table.weight"), r"lacks class_embedding\.weight"),
        (with_one("cls_embedding.uncond_embedding", 4), r"also holds cls_embedding\.uncond"),
        (with_one("layers.0.attention.bias", 1), r"also holds layers\.0\.attention\.bias"),
        (with_one("layers.0.feed_forward.w1.weight", 16), r"also holds .*w1.*; it lacks .*gate_up"),
        (with_one("layers.0.attention.wqkv.weight", 9, 16), r"\[9, 16\] in place of"),
        (with_one("norm.weight", 16, 1), r"\[16, 1\] in place of \[16\]"),
        (with_value("output.weight", torch.nan), r"c\.pt holds output\.weight .* not finite"),
    ],
)
def test_every_weight_is_accounted_for(change: Change, message: str, tmp_path: Path) -> None:
    weights = published(image_models.model())
    change(weights)
    torch.save({"model": weights}, tmp_path / "c.pt")
    with pytest.raises(ModelError, match=message):
        load_llamagen(tmp_path / "c.pt", **SIZES)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"grid_size": 4}, "num_attention_heads"),
        ({"num_attention_heads": 2}, "16 for pictures of 256"),
        *(
            (SIZES | {name: size}, f"{name} is .*; expected a whole number")
            for name in SIZES
            for size in (0, -1, 2.5, "4", -12, True)
        ),
        *((SIZES | {"num_attention_heads": heads}, f"{heads} heads") for heads in (3, 32)),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict[str, Any], message: str, tmp_path: Path) -> None:
    torch.save({"model": published(image_models.model())}, tmp_path / "c.pt")
    with pytest.raises(InputError, match=message):
        load_llamagen(tmp_path / "c.pt", **sizes)


@pytest.mark.parametrize("rows", [0, 1, 16, 18])
def test_a_rotary_table_of_no_square_is_refused(rows: int, tmp_path: Path) -> None:
    weights = published(image_models.model()) | {"freqs_cis": torch.zeros(rows, 4, 2)}
    torch.save({"model": weights}, tmp_path / "c.pt")
    with pytest.raises((ModelError, InputError), match="grid_size"):
        load_llamagen(tmp_path / "c.pt", num_attention_heads=2)


def test_a_dtype_may_be_requested(tmp_path: Path) -> None:
    model = copy.deepcopy(image_models.model()).bfloat16()
    torch.save({"model": published(model)}, tmp_path / "c.pt")
    assert load_llamagen(tmp_path / "c.pt", **SIZES).dtype == torch.bfloat16
    assert load_llamagen(tmp_path / "c.pt", **SIZES, dtype=torch.float32).dtype == torch.float32
