"""The layout of z-lab's DFlash: a configuration of Qwen3 with `dflash_config`, and its layers."""

from typing import Any

from ragspec.drafters.heads.checkpoint import NAMES, Checkpoint
from ragspec.drafters.heads.config import HeadWeights, part_of, size_of, taps_at
from ragspec.drafters.heads.eagle import layer_settings
from ragspec.errors import UnsupportedModelError
from ragspec.verification.causal import CausalTarget


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has DFlash's layout."""
    return "hidden_norm.weight" in checkpoint.names and "dflash_config" in checkpoint.config


def read(checkpoint: Checkpoint, target: CausalTarget | None) -> HeadWeights:
    """Return the head of a folder; see `files.read_head`."""
    config, names = checkpoint.config, set(checkpoint.names)
    state = checkpoint.state(NAMES | {"hidden_norm.": "state_norm."}, names)
    about: dict[str, Any] = part_of(config, "dflash_config", dict)
    layers = layer_settings(config, names)
    if not (taps := taps_at(about, "target_layer_ids", after=1)):
        count, n = size_of(config, "num_target_layers"), size_of(layers, "num_hidden_layers")
        places = [1 + i * (count - 4) / (n - 1) for i in range(n)] if n > 1 else [count // 2]
        taps = tuple(round(place) + 1 for place in places)  # of a head that names none
    causal = config.get("is_causal")
    causal = about.get("causal") if causal is None else causal  # in the order of vLLM
    if causal and {"sliding_attention"} != {*part_of(layers, "layer_types", list)}:
        raise UnsupportedModelError(
            f"{checkpoint.folder} holds a DFlash with causal attention in layers without a window; "
            "expected is_causal false or none. Use a head of another kind."
        )
    return checkpoint.head(
        state,
        causal_windows=causal is None or bool(causal),
        layers=layers,
        target_size=state["fc.weight"].shape[1] // len(taps),
        vocab_size=size_of(config, "vocab_size"),
        taps=taps,
        form="dflash",
        slots=size_of(config, "block_size") - 1,
        mask_token=about.get("mask_token_id"),
    )
