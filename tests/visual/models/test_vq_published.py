"""Published tokenizer files against a plain decoder and encoder that read the same names."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import VQModel
from torch.nn import functional
from transformers import Emu3VQVAE, Emu3VQVAEConfig, JanusVQVAE, JanusVQVAEConfig

from ragspec.errors import ModelError, UnsupportedModelError
from ragspec.visual import ImagePipeline, VQTokenizer, load_llamagen
from tests.support import image_models
from tests.support.damage import Change, with_one, without
from tests.support.plain_vq import CODES, DIM, LATENT, Plain, Weights, published
from tests.support.tiny_masked import kl_published
from tests.visual.models.test_llamagen_checkpoint import SIZES
from tests.visual.models.test_llamagen_checkpoint import published as published_generator


def saved(path: Path, weights: Weights | None = None, **more: Any) -> Path:
    """Write a file as the published ones are."""
    torch.save({"model": published() if weights is None else weights, **more}, path)
    return path


def some_codes() -> torch.Tensor:
    return torch.randint(CODES, (2, 4, 4), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("named", [dict, kl_published])  # LlamaGen's names and LDM's
def test_codes_become_the_pixels_of_the_published_layers(named: Any, tmp_path: Path) -> None:
    weights = published()
    file = saved(tmp_path / "vq.pt", named(weights))
    tokenizer = VQTokenizer.from_pretrained(file, torch.float64)
    assert (tokenizer.vocab_size, tokenizer.reduction) == (CODES, 4)
    expected = Plain(weights).decode(some_codes())
    assert expected.shape == (2, 3, 16, 16)
    assert float(expected.std()) > 0.1 and float((expected.abs() < 1).double().mean()) > 0.8
    assert torch.allclose(tokenizer.decode(some_codes()).double(), expected.clamp(-1, 1), atol=1e-5)
    half = VQTokenizer.from_pretrained(tmp_path / "vq.pt").decode(some_codes())
    assert torch.allclose(half.double(), expected.clamp(-1, 1), atol=1e-4)


def test_pictures_become_the_codes_of_the_published_layers(tmp_path: Path) -> None:
    weights = published()
    tokenizer = VQTokenizer.from_pretrained(saved(tmp_path / "vq.pt", weights), torch.float64)
    dice = torch.Generator().manual_seed(2)
    images = torch.rand(3, 3, 16, 16, generator=dice, dtype=torch.float64) * 2 - 1
    codes = tokenizer.encode(images)
    assert torch.equal(codes, Plain(weights).encode(images))
    assert len(set(codes.flatten().tolist())) > 3


def test_saved_in_the_layout_of_diffusers_it_decodes_the_same(tmp_path: Path) -> None:
    tokenizer = VQTokenizer.from_pretrained(saved(tmp_path / "vq.pt"))
    tokenizer.save_pretrained(tmp_path / "folder", dtype=torch.float32)
    expected = tokenizer.decode(some_codes())
    again = VQTokenizer.from_pretrained(tmp_path / "folder")
    assert torch.allclose(again.decode(some_codes()), expected, atol=1e-5)
    model = VQModel.from_pretrained(tmp_path / "folder")
    with torch.no_grad():  # which does not make codes unit length
        instance = model.decode(some_codes(), force_not_quantize=True, shape=(2, 4, 4, DIM)).sample
    assert torch.allclose(instance.clamp(-1, 1), expected, atol=1e-5)


def test_two_published_files_make_a_pipeline(tmp_path: Path) -> None:
    torch.save({"model": published_generator(image_models.model())}, tmp_path / "c2i.pt")
    model = load_llamagen(tmp_path / "c2i.pt", **SIZES)
    pipe = ImagePipeline(model, VQTokenizer.from_pretrained(saved(tmp_path / "vq.pt")), "jacobi")
    out = pipe(class_labels=[0, 2], generator=torch.Generator().manual_seed(0), output_type="pt")
    assert out.images.shape == (2, 3, 16, 16)
    expected = Plain(published()).decode(out.codes).clamp(-1, 1) / 2 + 0.5
    assert torch.allclose(out.images.double(), expected, atol=1e-4)
    model.save_pretrained(tmp_path / "target")
    opening: dict[str, Any] = {"tokenizer": tmp_path / "vq.pt", "device": "cpu"}
    beside = ImagePipeline.from_pretrained(tmp_path / "target", None, **opening)
    assert beside.tokenizer.vocab_size == CODES


def test_the_running_mean_is_taken_where_there_is_one(tmp_path: Path) -> None:
    mean = published()
    file = saved(tmp_path / "vq.pt", {name: value * 2 for name, value in mean.items()}, ema=mean)
    book = VQTokenizer.from_pretrained(file, torch.float64).model.quantize.embedding.weight
    assert torch.equal(book, mean["quantize.embedding.weight"].double())


def test_a_generator_is_reported_from_a_tokenizer(tmp_path: Path) -> None:
    torch.save({"model": published_generator(image_models.model())}, tmp_path / "c2i.pt")
    with pytest.raises(ModelError, match="open it with load_llamagen"):
        VQTokenizer.from_pretrained(tmp_path / "c2i.pt")
    with pytest.raises(ModelError, match="holds no tensors, and no encoder"):
        VQTokenizer.from_pretrained(saved(tmp_path / "vq.pt", {}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("decoder.mid.1.q.bias"), r"lacks decoder\.mid_block\.attentions\.0\.to_q\.bias"),
        (without("quantize.embedding.weight"), "is no LlamaGen tokenizer"),
        (without("encoder.conv_in.weight"), "is no LlamaGen tokenizer"),
        (without("encoder.conv_blocks.1.res.0.conv1.weight"), r"also holds.*conv_blocks\.1"),
        (without("encoder.conv_blocks.2.attn.0.q.weight"), r"also holds.*conv_blocks\.2\.attn"),
        (with_one("ema.weight", 3), r"also holds ema\.weight"),
        (with_one("encoder.down.0.block.0.conv1.bias", 32), "holds twice"),
        (with_one("quantize.embedding.weight", 3), "is no LlamaGen tokenizer"),
        (with_one("decoder.mid.1.q.weight", 64, 64, 3, 3), r"\[64, 576\] in place of \[64, 64\]"),
        (with_one("encoder.conv_blocks.0.res.0.conv1.weight", 48, 32, 3, 3), "multiples of 32"),
        (with_one("encoder.conv_blocks.0.res.0.conv1.weight", 0, 32, 3, 3), "is no LlamaGen tok"),
    ],
)
def test_every_weight_is_accounted_for(change: Change, message: str, tmp_path: Path) -> None:
    weights = published()
    change(weights)
    with pytest.raises(ModelError, match=message):
        VQTokenizer.from_pretrained(saved(tmp_path / "vq.pt", weights))


def janus() -> Any:
    """Return a tiny tokenizer of Janus with random weights."""
    sizes = {"base_channels": 32, "channel_multiplier": [1, 2], "num_res_blocks": 1}
    book = {"latent_channels": LATENT, "embed_dim": DIM, "num_embeddings": CODES, "num_patches": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = JanusVQVAE(JanusVQVAEConfig(**sizes, **book))
        for weight in model.parameters():
            spread = 0.3 if weight.ndim == 1 else 1 / math.sqrt(weight[0].numel())
            weight.data = torch.randn_like(weight) * spread
    return model.eval()


def test_layers_by_the_names_of_ldm_are_those_of_janus(tmp_path: Path) -> None:
    model = janus()
    model.quantize.embedding.weight.data = functional.normalize(model.quantize.embedding.weight)
    tokenizer = VQTokenizer.from_pretrained(saved(tmp_path / "vqgan.ckpt", model.state_dict()))
    with torch.no_grad():
        images = model.decode(some_codes().flatten(1)).clamp(-1, 1)
        codes = model.encode(images, return_dict=True).image_tokens
    assert tokenizer.reduction == 2
    assert torch.allclose(tokenizer.decode(some_codes()), images, atol=1e-5)
    assert torch.equal(tokenizer.encode(images).flatten(), codes)


def test_tokenizers_of_another_layout_are_refused() -> None:
    config = Emu3VQVAEConfig(base_channels=32, channel_multiplier=[1, 2], num_res_blocks=1)
    with pytest.raises(UnsupportedModelError, match=r"without config\.block_out_channels"):
        VQTokenizer(Emu3VQVAE(config))
    with pytest.raises(UnsupportedModelError, match="Linear without encoder"):
        VQTokenizer(torch.nn.Linear(2, 2))
