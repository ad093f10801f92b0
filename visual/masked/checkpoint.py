"""Published MAR checkpoints (`mar_base/checkpoint-last.pth`), as `MaskedModel`.

MAR: Li et al. (arXiv 2406.11838). The running mean of the weights is preferred. Weights load by the
published names and their shapes determine the sizes. The number of attention heads, which no shape
determines, is looked up for the published widths.
"""

from pathlib import Path

import torch

from ragspec.errors import ModelError
from ragspec.visual.checks import side_of
from ragspec.visual.masked.model import MaskedConfig, MaskedModel
from ragspec.visual.models.autoencoder import FACTOR
from ragspec.visual.models.published import PLACES, Tensors, WeightLayout, by_patterns, count_blocks

_LAYOUT = WeightLayout(
    "MAR model",
    {  # axes of the weights that determine sizes
        "z_proj.weight": 2,
        "class_emb.weight": 2,
        "encoder_pos_embed_learned": 3,
        "diffusion_pos_embed_learned": 3,
        "encoder_blocks.0.mlp.fc1.weight": 2,
        "decoder_blocks.0.mlp.fc1.weight": 2,
        "diffloss.net.input_proj.weight": 2,
        "diffloss.net.res_blocks.0.mlp.0.weight": 2,
    },
    by_patterns(),
    places=("model_ema", *PLACES),
    heads={768: 12, 1024: 16, 1280: 16},  # base, large, huge
)


def load_mar(
    path: str | Path, *, num_attention_heads: int | None = None, dtype: torch.dtype | None = None
) -> MaskedModel:
    """Return the model of a published checkpoint file, in eval mode on the CPU.

    Args:
        num_attention_heads: Required for widths that were not published.
        dtype: None keeps the file's.

    Returns:
        The model; its latents are those of KL-16 times 0.2325.

    Raises:
        MissingModelError, ModelError: The file is missing, or holds other objects, other weights
            or weights that are not finite.
        InputError: The number of heads is unknown or impossible.
    """
    model = _LAYOUT.load(path, lambda w, *_: MaskedModel(_config(w, num_attention_heads)), dtype)
    model.config.dtype = model.dtype
    return model


def _config(weights: Tensors, heads: int | None) -> MaskedConfig:
    """Derive the configuration of a model from its weights."""
    hidden, width = weights["z_proj.weight"].shape
    places = weights["diffusion_pos_embed_learned"].shape[1]
    side, buffer = side_of(places), weights["encoder_pos_embed_learned"].shape[1] - places
    if side is None or buffer < 1:
        raise ModelError(
            f"the model has {places} places and {buffer} class embeddings before them; expected a "
            "square of places, and one embedding at least. Copy the file again."
        )
    return MaskedConfig(
        latent_dim=width,
        hidden_size=hidden,
        encoder_layers=count_blocks(weights, "encoder_blocks"),
        decoder_layers=count_blocks(weights, "decoder_blocks"),
        num_attention_heads=_LAYOUT.checked_heads(heads, hidden),
        intermediate_size=len(weights["encoder_blocks.0.mlp.fc1.weight"]),
        grid_size=side,
        num_classes=len(weights["class_emb.weight"]),
        buffer_size=buffer,
        head_width=len(weights["diffloss.net.input_proj.weight"]),
        head_layers=count_blocks(weights, "diffloss.net.res_blocks"),
        deviation=1.0 / FACTOR,
    )
