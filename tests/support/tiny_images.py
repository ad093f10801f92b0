"""Tiny image generators with random weights, and folders of them."""

from pathlib import Path
from typing import Any

import torch

from ragspec.visual import LlamaGenConfig, LlamaGenModel, VQTokenizer

CODES = 24
SIDE = 3
CLASSES = ("red", "green/leaf", "blue")


def dice(seed: int = 1) -> torch.Generator:
    """Return a generator of a call's seeds."""
    return torch.Generator().manual_seed(seed)


def model(
    condition: str = "class", *, layers: int = 2, codes: int = CODES, seed: int = 0, **more: Any
) -> Any:
    """Return a tiny LlamaGen model with uneven distributions; more: fields of its config."""
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "initializer_range": 0.3}
    inputs: dict[str, Any] = {"num_classes": len(CLASSES), "id2label": dict(enumerate(CLASSES))}
    if condition == "features":
        inputs = {"condition_length": 4, "caption_dim": 224}
    config = LlamaGenConfig(
        vocab_size=codes,
        num_hidden_layers=layers,
        num_attention_heads=2,
        condition=condition,
        **{"grid_size": SIDE, **sizes, **inputs, **more},
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaGenModel(config).eval()


def tokenizer(codes: int = CODES, seed: int = 0) -> VQTokenizer:
    """Return a tiny tokenizer of pictures of 6 x 6 pixels."""
    from diffusers import VQModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        vq = VQModel(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(8, 8),
            layers_per_block=1,
            latent_channels=4,
            vq_embed_dim=4,
            num_vq_embeddings=codes,
            norm_num_groups=4,
            sample_size=2 * SIDE,
        )
    return VQTokenizer(vq)


def save(folder: Path, condition: str = "class") -> Path:
    """Save a whole generator, with a draft model, and return its folder."""
    model(condition).save_pretrained(folder / "target")
    model(condition, layers=1, seed=1).save_pretrained(folder / "draft")
    tokenizer().save_pretrained(folder / "tokenizer", dtype=torch.float32)
    return folder
