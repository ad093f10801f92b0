"""EAGLE's layout: a configuration of Llama, and one layer with its projection.

The names of EAGLE-1, EAGLE-2 and HASS are `fc` and `layers.N`; EAGLE-3 has `midlayer`, `norm`,
`lm_head`, `d2t` and `t2d`. A file says nothing of its target but sizes. Taps that it does not name
are EAGLE-3's own. Those in `eagle_config` are outputs of layers if the first is 1, as SGLang reads.
"""

from typing import Any

from torch import Tensor

from ragspec.drafters.heads.checkpoint import NAMES, TAP_NAMES, Checkpoint, select_layers, to_file
from ragspec.drafters.heads.config import HeadWeights, norms_of, part_of, size_of, taps_at
from ragspec.drafters.heads.head import DraftHead, default_taps
from ragspec.verification.causal import CausalTarget


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has EAGLE's layout."""
    names = checkpoint.names
    prefixes = ("midlayer.", "layers.0.") if "fc.weight" in names else "midlayer."
    return any(name.startswith(prefixes) for name in names)


def read(checkpoint: Checkpoint, target: CausalTarget | None) -> HeadWeights:
    """Return the head of a folder; see `files.read_head`."""
    config, names = checkpoint.config, set(checkpoint.names)
    state = checkpoint.state(TAP_NAMES | {"midlayer.": "layers.layers.0."}, names)
    layers = layer_settings(config, names)
    inputs = state["fc.weight"].shape[1]
    settings: dict[str, Any] = {"embedding_size": inputs - size_of(layers, "hidden_size")}
    settings["bias"] = "fc.bias" in names or bool(config.get("bias"))  # EAGLE-3 has none
    if any(name.endswith(".hidden_norm.weight") for name in names):
        name, inner = "eagle_aux_hidden_state_layer_ids", part_of(config, "eagle_config", dict)
        after = int(part_of(inner, name, list)[:1] == [1])
        taps = taps_at(inner, name, after) or taps_at(config, name) or default_taps(target)
        settings = {"form": "eagle3", "taps": taps, "target_size": inputs // len(taps)}
        settings |= norms_of(config | inner)
    vocab_size = size_of(config | part_of(config, "ragspec", dict), "vocab_size")
    return checkpoint.head(state, layers=layers, vocab_size=vocab_size, **settings)


def layer_settings(config: dict[str, object], names: set[str]) -> dict[str, object]:
    """Return transformers' configuration of a head's layers, whose class their tensors tell."""
    layers = select_layers(config)
    kind, biases = "llama", {name.split(".")[-2] for name in names if name.endswith("proj.bias")}
    if any(name.endswith("q_norm.weight") for name in names):
        kind = "qwen3"
    elif "q_proj" in biases and "o_proj" not in biases:
        kind = "qwen2"
    elif "q_proj" in biases:
        layers["attention_bias"] = True
    layers.setdefault("num_hidden_layers", 1)
    layers.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    return {"model_type": kind, **layers}


def to_layout(head: DraftHead) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the configuration and the tensors of a head of EAGLE-1 in this layout."""
    config = dict(head.config.layers, architectures=["LlamaForCausalLMEagle"], model_type="llama")
    config |= {"vocab_size": head.config.vocab_size, "bias": head.config.bias}
    return config, to_file(head, NAMES)
