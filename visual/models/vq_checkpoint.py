"""Converts weights of published convolutional autoencoders to the layout of diffusers.

The layouts are LDM's (Rombach et al., arXiv 2112.10752), which Janus and MAR share, and LlamaGen's;
all follow Esser et al. (2012.09841). Attention's 1 x 1 convolutions are linear layers in diffusers.
Widths and blocks are read off the shapes. The groups of the norms are 32 in all published models.
"""

from __future__ import annotations

import re
from collections import Counter
from copy import deepcopy
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import torch

from ragspec.errors import ModelError, ModelNotFoundError
from ragspec.visual.models.weights_file import PLACES, Tensors, check_finite, read_checkpoint

_GROUPS = 32
_RENAMES = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        # LlamaGen's name | Janus' name
        (r"^encoder\.(?:conv_blocks|down)\.", "encoder.down_blocks."),
        (r"^decoder\.(?:conv_blocks|up)\.", "decoder.up_blocks."),
        (r"\.(?:res|block)\.(?=\d)", ".resnets."),
        (r"\.attn\.(?=\d)", ".attentions."),
        (r"\.(down|up)sample\.conv\.", r".\1samplers.0.conv."),
        (r"\.mid\.(?:0|block_1)\.", ".mid_block.resnets.0."),
        (r"\.mid\.(?:1|attn_1)\.", ".mid_block.attentions.0."),
        (r"\.mid\.(?:2|block_2)\.", ".mid_block.resnets.1."),
        (r"\.nin_shortcut\.", ".conv_shortcut."),
        (r"coder\.norm_out\.", "coder.conv_norm_out."),
        (r"(attentions\.\d+)\.norm\.", r"\1.group_norm."),
        (r"(attentions\.\d+)\.([qkv])\.", r"\1.to_\2."),
        (r"(attentions\.\d+)\.proj_out\.", r"\1.to_out.0."),
    )
)
_LINEAR = re.compile(r".+\.attentions\.\d+\.to_(?:[qkv]|out\.0)\.weight")


def diffusers_name(name: str) -> str:
    """Return diffusers' name of a published weight."""
    for pattern, ours in _RENAMES:
        name = pattern.sub(ours, name)
    return name


def with_linear_layers(weights: Tensors) -> Tensors:
    """Return weights, by diffusers' names, with attention's convolutions as linear layers."""
    # A kernel other than 1 x 1 becomes too wide, so that `with_weights` refuses it.
    linear = {name for name in weights if _LINEAR.fullmatch(name) and is_convolution(weights, name)}
    return {name: each.flatten(1) if name in linear else each for name, each in weights.items()}


def is_convolution(weights: Tensors, name: str) -> bool:
    """Return whether a weight of this name exists and has the four axes of a convolution."""
    return name in weights and weights[name].ndim == 4


def convolution_sizes(weights: Tensors, origin: str) -> dict[str, Any]:
    """Return the fields of a diffusers configuration for encoder and decoder, by their weights.

    Raises:
        ModelError: A width is no multiple of the groups of a norm.
    """
    block = "encoder.down_blocks.{}.resnets.{}.conv1.weight"
    levels = list(takewhile(lambda i: is_convolution(weights, block.format(i, 0)), count()))
    layers = list(takewhile(lambda j: is_convolution(weights, block.format(0, j)), count()))
    widths = tuple(len(weights[block.format(i, 0)]) for i in levels)
    if any(width % _GROUPS or not width for width in widths):
        raise ModelError(
            f"{origin} has blocks of {widths} channels; expected multiples of {_GROUPS}, the "
            "groups of a norm in every published tokenizer."
        )

    def kinds(blocks: str, plain: str) -> tuple[str, ...]:
        attends = (f"{blocks}.{i}.attentions.0.to_q.weight" in weights for i in levels)
        return tuple(f"Attn{plain}" if there else plain for there in attends)

    return {
        "in_channels": weights["encoder.conv_in.weight"].shape[1],
        "out_channels": len(weights["decoder.conv_out.weight"]),
        "down_block_types": kinds("encoder.down_blocks", "DownEncoderBlock2D"),
        "up_block_types": kinds("decoder.up_blocks", "UpDecoderBlock2D"),
        "block_out_channels": widths,
        "layers_per_block": len(layers),
        "norm_num_groups": _GROUPS,
    }


def with_weights(
    model: Any, weights: Tensors, names: dict[str, str], origin: str, kind: str
) -> Any:
    """Return the model with these weights, in eval mode.

    Args:
        names: Our names by the published ones.
        origin, kind: Source of the weights and kind of model, for the message.

    Raises:
        ModelError: The weights are not exactly the model's, in name and shape.
    """
    expected = model.state_dict()
    uses = Counter(names.values())
    faults = {
        "also holds": [name for name, ours in names.items() if ours not in expected],
        "holds twice": [name for name, ours in names.items() if uses[ours] > 1],
        "lacks": [name for name in expected if name not in weights],
        "holds": [
            f"{name} of shape {list(weights[ours].shape)} in place of {list(expected[ours].shape)}"
            for name, ours in names.items()
            if ours in expected and weights[ours].shape != expected[ours].shape
        ],
    }
    message = [f"{how} {', '.join(what[:3])}" for how, what in faults.items() if what]
    if message:
        raise ModelError(
            f"the weights of {origin} are not those of one {kind}: it "
            f"{'; it '.join(message)}. Expected all of a published one, and nothing else."
        )
    model.load_state_dict(weights, assign=True)
    return model.eval()


def open_folder(kind: Any, path: str | Path, dtype: torch.dtype, published: str) -> Any:
    """Load the autoencoder in a folder of diffusers' layout, safetensors only.

    Args:
        kind: A class of diffusers.
        published: Example of a published file, for the message.

    Raises:
        ModelNotFoundError: There is no config.json.
        ModelError: Weights are missing or do not fit.
    """
    name = kind.__name__
    if not (Path(path) / "config.json").is_file():
        raise ModelNotFoundError(
            f"got {str(path)!r}, which is no file and holds no config.json; expected a folder "
            f"with a {name}, or a published file such as {published}."
        )
    try:
        return kind.from_pretrained(
            Path(path), torch_dtype=dtype, use_safetensors=True, local_files_only=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ModelError(
            f"got a {name} in {str(path)!r} that does not load ({error}); expected safetensors "
            "that fit its config.json. Save it again."
        ) from error


def save_folder(model: Any, path: str | Path, dtype: torch.dtype) -> None:
    """Write an autoencoder's config and safetensors to a folder, the weights in `dtype`."""
    # diffusers' own `to` would warn of modules to keep in float32; there are none.
    copied = torch.nn.Module.to(deepcopy(model), dtype)
    copied.save_pretrained(path, safe_serialization=True)


PIXELS = 256  # side of the images that the published tokenizers were trained on
JANUS = "janus_vqgan"  # the model_type of transformers' JanusVQVAE

# The running mean first, as in LlamaGen's own script for tokenizers.
_PLACES = ("ema", *(place for place in PLACES if place != "ema"))
_DROPPED = ("quantize.codebook_used", "loss.")  # code counts, and weights of the training loss
_NEEDED = (
    "encoder.conv_in.weight",
    "encoder.down_blocks.0.resnets.0.conv1.weight",
    "encoder.conv_out.weight",
    "decoder.conv_out.weight",
)


def load_llamagen_vq(
    path: str | Path, dtype: torch.dtype = torch.float32, allow_namespace: bool = False
) -> Any:
    """Load the `VQModel` of a published tokenizer file, in eval mode on the CPU.

    Args:
        allow_namespace: See `read_checkpoint`.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelError: It holds other objects, other weights or weights that are not finite.
    """
    tensors, settings = read_checkpoint(path, allow_namespace, _PLACES)
    pixels = getattr(settings, "image_size", None)
    origin = Path(path).name
    weights = {
        name: value.to(dtype) for name, value in tensors.items() if not name.startswith(_DROPPED)
    }
    check_finite(weights, origin)
    return _vq_model(weights, origin, pixels if isinstance(pixels, int) and pixels > 0 else PIXELS)


def from_janus(model: Any) -> Any:
    """Return a `VQModel` that shares the weights of a `JanusVQVAE`.

    Raises:
        ModelError: The weights do not fit.
    """
    reduction = 2 ** (len(model.config.channel_multiplier) - 1)
    pixels = int(model.config.num_patches) * reduction
    return _vq_model(model.state_dict(), f"the {type(model).__name__}", pixels)


def _vq_model(published: Tensors, origin: str, pixels: int) -> Any:
    """Return the `VQModel` of weights by their published names; errors name `origin`."""
    from diffusers import VQModel

    names = {name: diffusers_name(name) for name in published}
    weights = with_linear_layers({ours: published[name] for name, ours in names.items()})
    _check_kind(weights, published, origin)
    book, dim = weights["quantize.embedding.weight"].shape
    config = convolution_sizes(weights, origin)
    with torch.device("meta"):
        model = VQModel(
            **config,
            latent_channels=len(weights["encoder.conv_out.weight"]),
            num_vq_embeddings=book,
            vq_embed_dim=dim,
            lookup_from_codebook=True,
            sample_size=pixels,
        )
    return with_weights(model, weights, names, origin, "LlamaGen tokenizer")


def _check_kind(weights: Tensors, published: Tensors, origin: str) -> None:
    """Raise ModelError for weights of another model, such as a generator's."""
    book = weights.get("quantize.embedding.weight")
    lacking = [name for name in _NEEDED if not is_convolution(weights, name)]
    if lacking or book is None or book.ndim != 2:
        names = ", ".join(sorted(published)[:3]) or "no tensors"
        generator = "tok_embeddings.weight" in published
        raise ModelError(
            f"{origin} is no LlamaGen tokenizer: it holds {names}; expected encoder, decoder and "
            f"quantize.embedding.weight under {', '.join(PLACES)} or at the top."
            + (" It is a generator: open it with load_llamagen." if generator else "")
        )
