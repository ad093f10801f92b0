"""The layout of z-lab's DFlash: a configuration of Qwen3 with `dflash_config`, and its layers."""

from typing import Any

from ragspec.drafters.heads.checkpoint import NAMES, Checkpoint, size_of
from ragspec.drafters.heads.config import HeadWeights
from ragspec.drafters.heads.eagle import layer_settings
from ragspec.verification.causal import CausalTarget


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has DFlash's layout."""
    return "hidden_norm.weight" in checkpoint.names and "dflash_config" in checkpoint.config


def read(checkpoint: Checkpoint, target: CausalTarget | None) -> HeadWeights:
    """Return the head of a folder; see `files.read_head`."""
    config, names = checkpoint.config, set(checkpoint.names)
    state = checkpoint.state(NAMES | {"hidden_norm.": "state_norm."}, names)
    about: dict[str, Any] = config["dflash_config"]
    layers = layer_settings(config, names)
    outputs = about.get("target_layer_ids") or _usual_outputs(
        size_of(config, "num_target_layers"), size_of(layers, "num_hidden_layers")
    )
    return checkpoint.head(
        state,
        layers=layers,
        target_size=state["fc.weight"].shape[1] // len(outputs),
        vocab_size=size_of(config, "vocab_size"),
        taps=tuple(layer + 1 for layer in outputs),
        form="dflash",
        slots=size_of(config, "block_size") - 1,
        mask_token=about.get("mask_token_id"),
    )


def _usual_outputs(count: int, layers: int) -> list[int]:
    """Return the layers, of `count`, whose outputs a head reads that names none."""
    if layers == 1:
        return [count // 2]
    return [round(1 + i * (count - 4) / (layers - 1)) for i in range(layers)]
