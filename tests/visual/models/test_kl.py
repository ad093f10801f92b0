"""Published KL autoencoders against a plain encoder and decoder of the same layers."""

from pathlib import Path

import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from PIL import Image

from ragspec.errors import InputError, MissingModelError, ModelError, UnsupportedModelError
from ragspec.visual import KLAutoencoder
from tests.support.damage import Change, without
from tests.support.plain_vq import Plain
from tests.support.tiny_masked import DIM, kl_file, kl_published, kl_weights


def some(*shape: int) -> torch.Tensor:
    dice = torch.Generator().manual_seed(1)
    return torch.rand(shape, generator=dice, dtype=torch.float64) * 2 - 1


def test_it_encodes_and_decodes_as_the_published_layers(tmp_path: Path) -> None:
    kl = KLAutoencoder.from_pretrained(kl_file(tmp_path / "kl.ckpt"), torch.float64)
    assert (kl.width, kl.reduction) == (DIM, 4)
    assert kl.model.config.scaling_factor == 0.2325
    plain = Plain(kl_weights())
    expected = plain.decoded(some(2, 4, 4, DIM)).clamp(-1, 1)
    assert float(expected.std()) > 0.1
    assert torch.allclose(kl.decode_latents(some(2, 4, 4, DIM)).double(), expected, atol=1e-5)
    images = some(2, 3, 16, 16)
    result = kl.latents(images)
    assert result.shape == (2, 16, DIM)
    assert torch.allclose(result.double(), plain.encoded(images)[..., :DIM], atol=1e-5)


def test_saved_in_the_layout_of_diffusers_it_decodes_the_same(tmp_path: Path) -> None:
    kl = KLAutoencoder.from_pretrained(kl_file(tmp_path / "kl.ckpt"))
    kl.save_pretrained(tmp_path / "folder")
    again = KLAutoencoder.from_pretrained(tmp_path / "folder")
    latents = some(1, 4, 4, DIM)
    assert torch.equal(again.decode_latents(latents), kl.decode_latents(latents))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("decoder.conv_in.weight"), r"is no KL autoencoder.* no decoder\.conv_in\.weight"),
        (without("encoder.down.2.attn.1.q.weight"), r"lacks .*attentions\.1\.to_q"),
    ],
)
def test_every_weight_is_accounted_for(change: Change, message: str, tmp_path: Path) -> None:
    weights = kl_published()
    change(weights)
    with pytest.raises(ModelError, match=message):
        KLAutoencoder.from_pretrained(kl_file(tmp_path / "kl.ckpt", weights))


def test_bad_input_is_refused(tmp_path: Path) -> None:
    kl = KLAutoencoder.from_pretrained(kl_file(tmp_path / "kl.ckpt"))
    with pytest.raises(InputError, match=r"expected \[B, h, w, 4\]"):
        kl.decode_latents(torch.zeros(1, 4, 4, 5))
    pixels = VaeImageProcessor(vae_scale_factor=4).preprocess(Image.new("RGB", (18, 17), "red"))
    assert kl.latents(pixels).shape == (1, 16, DIM)  # as the error of other images advises
    with pytest.raises(MissingModelError, match=r"kl16\.ckpt"):
        KLAutoencoder.from_pretrained(tmp_path / "nothing")
    with pytest.raises(UnsupportedModelError, match="expected a diffusers AutoencoderKL"):
        KLAutoencoder(torch.nn.Linear(2, 2))
