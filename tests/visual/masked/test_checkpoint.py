"""Published MAR files: sizes and weights, damaged files."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ragspec.errors import InputError, MissingModelError, ModelError
from ragspec.visual.masked.checkpoint import _config, load_mar
from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from tests.support import plain_mar, tiny_masked
from tests.support.damage import Change, with_one, without
from tests.support.plain_mar import published

HEADS: dict[str, Any] = {"num_attention_heads": plain_mar.HEADS}


def test_sizes_are_read_off_and_the_mean_is_taken(tmp_path: Path) -> None:
    plain, mean = published(seed=1), published(seed=2)
    model = load_mar(tiny_masked.file(tmp_path / "mar.pth", plain, mean), **HEADS)
    result = model.state_dict()
    assert result.keys() == mean.keys()
    assert all(torch.equal(result[name], value) for name, value in mean.items())
    config = model.config
    assert (config.latent_dim, config.hidden_size, config.grid_size) == (4, 12, 3)
    assert (config.encoder_layers, config.decoder_layers, config.head_layers) == (2, 1, 2)
    assert (config.num_classes, config.buffer_size, config.head_width) == (3, 2, 10)
    assert config.intermediate_size == 20 and config.deviation == pytest.approx(1 / 0.2325)
    assert not model.training and config.dtype == torch.float64


def test_weights_alone_and_safetensors_do_too(tmp_path: Path) -> None:
    save_file(published(), tmp_path / "mar.safetensors")
    torch.save({"model": published()}, tmp_path / "mar.pth")
    for name in ("mar.safetensors", "mar.pth"):
        model = load_mar(tmp_path / name, num_attention_heads=3, dtype=torch.float16)
        assert model.mask_token.dtype == torch.float16


@pytest.mark.parametrize(
    ("width", "layers", "heads", "head", "parameters"),
    [
        (768, 12, 12, (6, 1024), 208),  # millions, as the paper counts them
        (1024, 16, 16, (8, 1280), 479),
        (1280, 20, 16, (12, 1536), 943),
    ],
)
def test_the_published_sizes_are_known(
    width: int, layers: int, heads: int, head: tuple[int, int], parameters: int
) -> None:
    config = MaskedConfig(
        **{"hidden_size": width, "encoder_layers": layers, "decoder_layers": layers},
        **{"num_attention_heads": heads, "head_layers": head[0], "head_width": head[1]},
    )
    with torch.device("meta"):
        model = MaskedModel(config)
    assert math.ceil(sum(each.numel() for each in model.parameters()) / 1e6) == parameters
    message, expected = _config(model.state_dict(), None).to_dict(), config.to_dict()
    assert message.pop("deviation") == 1 / 0.2325 and expected.pop("deviation") == 1.0
    assert message == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("z_proj.weight"), r"is no MAR model: it holds .*, and no z_proj\.weight"),
        (without("encoder_blocks.0.attn.qkv.bias"), r"lacks encoder_blocks\.0\.attn\.qkv\.bias"),
        (with_one("encoder_blocks.1.mlp.fc1.weight", 21, 12), r"\[21, 12\] in place of \[20, 12\]"),
        (with_one("class_emb.weight", 3), "is no MAR model"),
        (with_one("diffusion_pos_embed_learned", 1, 8, 12), "8 places .* expected a square"),
        (with_one("encoder_pos_embed_learned", 1, 9, 12), "0 class embeddings"),
    ],
)
def test_every_weight_is_accounted_for(change: Change, message: str, tmp_path: Path) -> None:
    weights = published()
    change(weights)
    with pytest.raises(ModelError, match=message):
        load_mar(tiny_masked.file(tmp_path / "mar.pth", weights), **HEADS)


def test_files_and_heads_that_cannot_be_are_refused(tmp_path: Path) -> None:
    file = tiny_masked.file(tmp_path / "mar.pth")
    with pytest.raises(MissingModelError):
        load_mar(tmp_path / "no.pth")
    with pytest.raises(InputError, match=r"width of 12.*heads as it was trained"):
        load_mar(file)
    with pytest.raises(InputError, match="5 attention heads for a width of 12"):
        load_mar(file, num_attention_heads=5)
    with pytest.raises(InputError, match="num_attention_heads is 0"):
        load_mar(file, num_attention_heads=0)
