"""Published LlamaGen image tokenizers (`vq_ds16_c2i.pt`), and Janus', as diffusers' `VQModel`.

LlamaGen: Sun et al. (arXiv 2406.06525), its tokenizer after Esser et al. (arXiv 2012.09841). The
layers are those of `VQModel` by other names, attention's 1 x 1 convolutions as linear layers.
Widths, blocks and book are read off the shapes. Shapes do not tell the groups of the norms, 32 in
all published ones. The book stays as it lies in the file: `VQTokenizer` makes it unit length.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ragspec.errors import ModelError
from ragspec.visual.models.ldm_names import (
    check_weights,
    convolution_sizes,
    diffusers_name,
    is_convolution,
    with_linear_layers,
)
from ragspec.visual.models.weights_file import PLACES, Tensors, check_finite, read_checkpoint

PIXELS = 256  # a side of the pictures that the published ones were trained on
JANUS = "janus_vqgan"  # the model_type of transformers' JanusVQVAE

# The running mean first, as in LlamaGen's own script that draws with the tokenizer.
_PLACES = ("ema", *(place for place in PLACES if place != "ema"))
_DROPPED = ("quantize.codebook_used", "loss.")  # a count of codes, and what trains beside it
_BOOK = 2  # axes of its weight
_NEEDED = (
    "encoder.conv_in.weight",
    "encoder.down_blocks.0.resnets.0.conv1.weight",
    "encoder.conv_out.weight",
    "decoder.conv_out.weight",
)


def load_llamagen_vq(
    path: str | Path, dtype: torch.dtype = torch.float32, allow_namespace: bool = False
) -> Any:
    """Return the `VQModel` of a published tokenizer file, in eval mode on the CPU.

    allow_namespace: see `read_checkpoint`. Raises ModelNotFoundError, ModelError for files that
    hold other objects, other weights or weights that are not finite.
    """
    result, settings = read_checkpoint(path, allow_namespace, _PLACES)
    pixels = getattr(settings, "image_size", None)
    origin = Path(path).name
    weights = {
        name: value.to(dtype) for name, value in result.items() if not name.startswith(_DROPPED)
    }
    check_finite(weights, origin)
    return _vq_model(weights, origin, pixels if isinstance(pixels, int) and pixels > 0 else PIXELS)


def from_janus(model: Any) -> Any:
    """Return a `VQModel` that shares the weights of a `JanusVQVAE`; raises ModelError."""
    reduction = 2 ** (len(model.config.channel_multiplier) - 1)
    pixels = int(model.config.num_patches) * reduction
    return _vq_model(model.state_dict(), f"the {type(model).__name__}", pixels)


def _vq_model(published: Tensors, origin: str, pixels: int) -> Any:
    """Return the model of weights by their published names; origin: whose they are, for errors."""
    from diffusers import VQModel

    names = {name: diffusers_name(name) for name in published}
    weights = with_linear_layers({ours: published[name] for name, ours in names.items()})
    _check_kind(weights, published, origin)
    config = _config(weights, origin)
    with torch.device("meta"):
        model = VQModel(**config, sample_size=pixels)
    check_weights(model.state_dict(), weights, names, origin, "LlamaGen tokenizer")
    model.load_state_dict(weights, assign=True)
    return model.eval()


def _config(weights: Tensors, origin: str) -> dict[str, Any]:
    """Return the sizes of a model by its weights; raises ModelError for widths without a norm."""
    book, dim = weights["quantize.embedding.weight"].shape
    return {
        **convolution_sizes(weights, origin),
        "latent_channels": len(weights["encoder.conv_out.weight"]),
        "num_vq_embeddings": book,
        "vq_embed_dim": dim,
        "lookup_from_codebook": True,
    }


def _check_kind(weights: Tensors, published: Tensors, origin: str) -> None:
    """Raise ModelError for weights of something else, such as those of a generator."""
    book = weights.get("quantize.embedding.weight")
    lacking = [name for name in _NEEDED if not is_convolution(weights, name)]
    if lacking or book is None or book.ndim != _BOOK:
        message = ", ".join(sorted(published)[:3]) or "no tensors"
        generator = "tok_embeddings.weight" in published
        raise ModelError(
            f"{origin} is no LlamaGen tokenizer: it holds {message}; expected encoder, decoder and "
            f"quantize.embedding.weight under {', '.join(PLACES)} or at the top."
            + (" It is a generator: open it with load_llamagen." if generator else "")
        )
