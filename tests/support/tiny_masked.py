"""Tiny masked models of continuous latents, and published files of them with their autoencoders."""

import argparse
from pathlib import Path
from typing import Any

import torch

from ragspec.visual.masked.checkpoint import load_mar
from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from tests.support import plain_mar, plain_vq, tiny_images

DIM = plain_mar.WIDTH
SIZES = {  # of a model of nine places and three classes
    **{"hidden_size": 12, "encoder_layers": 1, "decoder_layers": 1, "num_attention_heads": 3},
    **{"grid_size": 3, "num_classes": 3, "buffer_size": 2, "head_width": 10, "head_layers": 2},
}


def config(latent_dim: int, **settings: Any) -> MaskedConfig:
    """Return the configuration of a tiny model."""
    return MaskedConfig(latent_dim=latent_dim, **SIZES | settings)


def file(
    path: Path, weights: plain_mar.Weights | None = None, mean: plain_mar.Weights | None = None
) -> Path:
    """Write a checkpoint as the published ones are: plain weights, their mean, and settings."""
    plain = plain_mar.published() if weights is None else weights
    mean = {name: value.clone() for name, value in plain.items()} if mean is None else mean
    settings = argparse.Namespace(model="mar_base", img_size=256, buffer_size=64)
    torch.save({"model": plain, "model_ema": mean, "epoch": 1, "args": settings}, path)
    return path


def model(folder: Path, strength: float = 1.0) -> MaskedModel:
    """Return the model of a published file, in float64."""
    path = file(folder / "mar.pth", plain_mar.published(strength=strength))
    return load_mar(path, num_attention_heads=plain_mar.HEADS)


def kl_weights() -> dict[str, Any]:
    """Return a KL autoencoder's weights by the names of LlamaGen's layers, for `plain_vq`."""
    maker = plain_vq.Maker()
    maker.half("encoder", (3, 2 * DIM), plain_vq.WIDTHS, plain_vq.BLOCKS)
    maker.half("decoder", (DIM, 3), plain_vq.WIDTHS[::-1], plain_vq.BLOCKS + 1)
    maker.conv("quant_conv", 2 * DIM, 2 * DIM, kernel=1)
    maker.conv("post_quant_conv", DIM, DIM, kernel=1)
    maker.weights["decoder.conv_out.weight"] *= 0.3
    decoders = "decoder.conv_blocks"  # whose levels have no attention
    return {
        n: w for n, w in maker.weights.items() if not (n.startswith(decoders) and ".attn." in n)
    }


def kl_published(weights: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return them by the published names: LDM's, the decoder's levels from the widest on."""
    result, levels = {}, len(plain_vq.WIDTHS)
    for name, value in (kl_weights() if weights is None else weights).items():
        parts = name.split(".")
        if parts[1] == "conv_blocks":
            number = int(parts[2])
            level = number if parts[0] == "encoder" else levels - 1 - number
            parts[1:3] = ["down" if parts[0] == "encoder" else "up", str(level)]
        named = {"res": "block"}
        if parts[1] == "mid":
            parts[2] = {"0": "block_1", "1": "attn_1", "2": "block_2"}[parts[2]]
        result[".".join(named.get(part, part) for part in parts)] = value
    return result


def kl_file(path: Path, weights: dict[str, Any] | None = None) -> Path:
    """Write an autoencoder as it was published, with a part that only training needs."""
    instance = kl_published() if weights is None else weights
    torch.save({"model": instance | {"loss.logvar": torch.zeros(())}}, path)
    return path


def save(root: Path) -> Path:
    """Write a model over a tokenizer's latents and the tokenizer to a folder, as training does."""
    names = dict(enumerate(tiny_images.CLASSES))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        instance = MaskedModel(config(DIM, clip=2.0, id2label=names))
        for weight in instance.parameters():
            weight.data.normal_(0.0, 0.3)
    instance.save_pretrained(root / "target")
    tiny_images.tokenizer().save_pretrained(root / "tokenizer", dtype=torch.float32)
    return root
