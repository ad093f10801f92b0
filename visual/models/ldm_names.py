"""The layers of published convolutional autoencoders, by the names that diffusers has for them.

LDM's (Rombach et al., arXiv 2112.10752), which are Janus' and MAR's too, and LlamaGen's: all after
Esser et al. (2012.09841). Attention's 1 x 1 convolutions are linear layers in diffusers. Widths and
blocks are read off the shapes, which do not tell the groups of the norms, 32 in all published ones.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import count, takewhile
from typing import Any

from ragspec.errors import ModelError
from ragspec.visual.models.weights_file import Tensors

_GROUPS = 32
_CONVOLUTION = 4  # axes of its weight
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
    """Return the name that diffusers has for a published weight."""
    for pattern, ours in _RENAMES:
        name = pattern.sub(ours, name)
    return name


def with_linear_layers(weights: Tensors) -> Tensors:
    """Return weights by diffusers' names with attention's convolutions as linear layers."""
    # A kernel that is not 1 x 1 becomes too wide and is refused, not cut.
    linear = {name for name in weights if _LINEAR.fullmatch(name) and is_convolution(weights, name)}
    return {name: each.flatten(1) if name in linear else each for name, each in weights.items()}


def is_convolution(weights: Tensors, name: str) -> bool:
    """Tell whether there is such a weight with the axes of a convolution's."""
    return name in weights and weights[name].ndim == _CONVOLUTION


def convolution_sizes(weights: Tensors, origin: str) -> dict[str, Any]:
    """Return what a diffusers configuration says of encoder and decoder, by their weights.

    Raises ModelError for widths without a norm.
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


def check_weights(
    expected: Tensors, weights: Tensors, names: dict[str, str], origin: str, kind: str
) -> None:
    """Raise ModelError unless there is one weight of the right shape for each that is expected.

    names: ours by the published ones. origin: whose they are. kind: of model, for the message.
    """
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
