"""The VQ tokenizer: encoding, decoding, the normalised look-up, saved files and errors."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import VQModel
from PIL import Image
from torch.nn import functional

from ragspec.errors import InputError, MissingModelError, ModelError
from ragspec.visual import KLAutoencoder, VQTokenizer
from tests.support.tiny_masked import kl_file

CODES, SIZE = 16, 4


def small_model(**changes: Any) -> Any:
    """Build a tiny `VQModel`: pictures of 8 x 8, 2 x 2 codes of 16, rows of very unequal length."""
    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "block_out_channels": (8, 8, 8),
        "down_block_types": ("DownEncoderBlock2D",) * 3,
        "up_block_types": ("UpDecoderBlock2D",) * 3,
        "latent_channels": 8,
        "vq_embed_dim": SIZE,
        "num_vq_embeddings": CODES,
        "norm_num_groups": 4,
        "mid_block_add_attention": False,
        "sample_size": 8,
    }
    model = VQModel(**fields | changes)
    lengths = torch.linspace(0.1, 3, CODES)[:, None]
    model.quantize.embedding.weight.data = torch.randn(CODES, SIZE) * lengths
    return model


def pictures(count: int = 3, side: int = 8) -> torch.Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_sizes_are_those_of_the_model() -> None:
    tokenizer = VQTokenizer(small_model())
    assert (tokenizer.vocab_size, tokenizer.reduction) == (CODES, 4)
    codes = tokenizer.encode(pictures())
    assert codes.shape == (3, 4) and codes.dtype == torch.int64
    instance = tokenizer.decode(codes)
    assert instance.shape == (3, 3, 8, 8) and instance.dtype == torch.float32
    assert float(instance.abs().max()) <= 1
    larger = tokenizer.encode(pictures(side=16))
    assert larger.shape == (3, 16)
    assert tokenizer.decode(larger).shape == (3, 3, 16, 16)
    assert tokenizer.decode(larger.view(3, 2, 8)).shape == (3, 3, 8, 32)


def test_the_look_up_is_by_cosine() -> None:
    model = small_model()
    tokenizer = VQTokenizer(model)
    with torch.no_grad():
        latents = model.encode(pictures()).latents.flatten(2).transpose(1, 2)
    book = model.quantize.embedding.weight
    nearest = functional.cosine_similarity(latents[:, :, None], book[None, None], dim=-1)
    assert torch.equal(tokenizer.encode(pictures()), nearest.argmax(-1))
    raw = torch.cdist(latents.flatten(0, 1), book).argmin(-1).view(3, 4)
    assert not torch.equal(raw, nearest.argmax(-1)), "the lengths of the rows must matter here"


def test_a_plain_book_is_searched_as_diffusers_does() -> None:
    model = small_model()
    tokenizer = VQTokenizer(model, normalised=False)
    with torch.no_grad():
        latents = model.encode(pictures()).latents
        _, _, (_, _, expected) = model.quantize(latents)
        sample = model.decode(latents).sample
    codes = tokenizer.encode(pictures())
    assert torch.equal(codes.flatten(), expected)
    assert torch.allclose(tokenizer.decode(codes), sample.clamp(-1, 1), atol=1e-5)


@pytest.mark.parametrize("norm_type", ["group", "spatial"])
def test_decoding_is_that_of_the_model(norm_type: str) -> None:
    fields: dict[str, Any] = {"norm_type": norm_type, "lookup_from_codebook": True}
    if norm_type == "spatial":  # comes with 32 groups, and reads the codes themselves
        fields |= {"block_out_channels": (32, 32, 32), "latent_channels": SIZE}
    model = small_model(**fields)
    tokenizer = VQTokenizer(model)
    codes = torch.randint(CODES, (2, 2, 2), generator=torch.Generator().manual_seed(3))
    latents = tokenizer.codebook()[codes].permute(0, 3, 1, 2)
    with torch.no_grad():
        spatial = latents if norm_type == "spatial" else None
        expected = model.decoder(model.post_quant_conv(latents), spatial)
    assert torch.allclose(tokenizer.decode(codes), expected.clamp(-1, 1), atol=1e-6)
    assert torch.equal(tokenizer.decode(codes), tokenizer.decode(codes.flatten(1)))


def test_the_book_is_a_copy_of_unit_length() -> None:
    model = small_model()
    book = VQTokenizer(model).codebook()
    assert book.shape == (CODES, SIZE) and book.dtype == torch.float32
    assert torch.allclose(book.norm(dim=-1), torch.ones(CODES))
    before = model.quantize.embedding.weight.clone()
    book.zero_()
    assert torch.equal(model.quantize.embedding.weight, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_storage_keeps_codes_and_pictures(tmp_path: Path, dtype: torch.dtype) -> None:
    tokenizer = VQTokenizer(small_model())
    rows = tokenizer.model.quantize.embedding.weight.clone()
    tokenizer.save_pretrained(tmp_path, dtype=dtype)
    assert torch.equal(tokenizer.model.quantize.embedding.weight, rows), "saving changed the model"
    assert not list(tmp_path.glob("*.bin"))
    loaded = VQTokenizer.from_pretrained(tmp_path)
    assert loaded.model.dtype == torch.float32
    assert torch.allclose(loaded.codebook(), tokenizer.codebook(), atol=1e-2)
    loaded.save_pretrained(tmp_path / "again", dtype=dtype)
    again = VQTokenizer.from_pretrained(tmp_path / "again").model.quantize.embedding.weight
    assert torch.equal(again, loaded.model.quantize.embedding.weight)
    codes = tokenizer.encode(pictures())
    assert float((loaded.decode(codes) - tokenizer.decode(codes)).abs().max()) < 0.05
    if dtype == torch.float32:
        assert torch.equal(loaded.encode(pictures()), codes)
        stored = loaded.model.quantize.embedding.weight
        assert torch.allclose(stored.norm(dim=-1), torch.ones(CODES), atol=1e-5)


def test_missing_foreign_and_damaged_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MissingModelError, match="holds no config"):
        VQTokenizer.from_pretrained(tmp_path)
    VQTokenizer(small_model()).save_pretrained(tmp_path)
    weights = next(tmp_path.glob("*.safetensors"))
    whole = weights.read_bytes()
    weights.write_bytes(whole[:200])
    with pytest.raises(ModelError, match="Save it again"):
        VQTokenizer.from_pretrained(tmp_path)
    weights.write_bytes(whole)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_vq_embeddings": 32}))
    with pytest.raises(ModelError, match="does not load"):
        VQTokenizer.from_pretrained(tmp_path)
    weights.unlink()
    with pytest.raises(ModelError, match="does not load"):
        VQTokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "uint8"),
        (np.zeros((1, 3, 8, 8)), "expected a tensor"),
        (Image.new("RGBA", (8, 8)), "VaeImageProcessor"),
        (Image.new("I;16", (8, 8)), r"preprocess\(load_image\(image\)\)"),
        ("a.png", "of <class 'str'>"),
        (torch.zeros(3, 8, 8), r"\[3, 8, 8\]"),
        (torch.zeros(1, 1, 8, 8), r"\[B, 3, H, W\]"),
        (torch.zeros(1, 3, 8, 10), "multiples of 4"),
        (torch.zeros(1, 3, 0, 8), "multiples of 4"),
        (torch.full((1, 3, 8, 8), 255.0), "127.5"),
        (torch.full((1, 3, 8, 8), float("nan")), "nan"),
    ],
)
def test_pictures_of_another_form_are_refused(images: Any, message: str, tmp_path: Path) -> None:
    kl = KLAutoencoder.from_pretrained(kl_file(tmp_path / "kl.ckpt"))
    for encode in (VQTokenizer(small_model()).encode, kl.latents):
        with pytest.raises(InputError, match=message):
            encode(images)


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        (torch.zeros(1, 4), "float32"),
        (torch.zeros(4, dtype=torch.int64), r"\[4\]"),
        (torch.full((1, 4), CODES), "condition ids"),
        (torch.full((1, 4), -1), "from -1"),
        (torch.zeros(1, 5, dtype=torch.int64), "square"),
    ],
)
def test_codes_outside_the_book_are_refused(codes: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        VQTokenizer(small_model()).decode(codes)
