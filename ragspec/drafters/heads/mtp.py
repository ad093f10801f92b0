"""Layers for multi-token prediction inside a model's own checkpoint, which transformers drops.

Three layouts are read: DeepSeek-V3's and GLM-4.5's `model.layers.N` behind the last layer, the
`mtp` of Qwen3-Next and Qwen3.5, and MiMo's `model.mtp_layers`. Only the shards with these tensors
are opened. The layer is one of the target's own class. Our reading: DeepSeek's feeds itself the
output before its norm (as vLLM does), the others the output after it.
"""

import re
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ragspec.drafters.heads.checkpoint import Checkpoint, select_layers
from ragspec.drafters.heads.config import HeadWeights, part_of, size_of
from ragspec.verification.causal import CausalTarget

_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


class _Layout(NamedTuple):
    """The names of a layout.

    Attributes:
        prefix: Before every tensor of its layers; {n} is the number of the target's layers.
        table: Prefixes of `DraftHead` by those of the first layer, which begins at `prefix`.
        rest: A pattern of tensors of further layers; {more} is the number after {n}.
    """

    prefix: str
    table: dict[str, str]
    rest: str
    settings: dict[str, Any]


_QWEN_NAMES = {
    "layers.0.": "layers.layers.0.",
    "fc.": "fc.",
    "pre_fc_norm_embedding.": "embedding_norm.",
    "pre_fc_norm_hidden.": "state_norm.",
    "norm.": "norm.",
}
MIMO_NAMES = {
    "": "layers.layers.0.",
    "input_proj.": "fc.",
    "token_layernorm.": "embedding_norm.",
    "hidden_layernorm.": "state_norm.",
    "final_layernorm.": "norm.",
}
_DEEPSEEK_NAMES = {
    "": "layers.layers.0.",
    "eh_proj.": "fc.",
    "enorm.": "embedding_norm.",
    "hnorm.": "state_norm.",
    "shared_head.norm.": "norm.",
    "shared_head.head.": "output.",
    "embed_tokens.": "embedding.",
}
LAYOUTS = (
    _Layout("mtp.", _QWEN_NAMES, r"mtp\.layers\.[1-9]", {"feeds_norm": True}),
    _Layout(
        "model.mtp_layers.0.",
        MIMO_NAMES,
        r"model\.mtp_layers\.[1-9]",
        {"feeds_norm": True, "state_first": True},
    ),
    _Layout("model.layers.{n}.", _DEEPSEEK_NAMES, r"model\.layers\.{more}\.", {}),
)


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a folder is a model with such layers."""
    return _layout(checkpoint) is not None


def read(checkpoint: Checkpoint, target: CausalTarget | None) -> HeadWeights:
    """Return the head of a folder; see `files.read_head`. Of several layers the first is read."""
    layout = _layout(checkpoint)
    assert layout is not None
    further = [name for name in checkpoint.names if re.match(layout.rest, name)]
    if further:
        warnings.warn(
            f"{checkpoint.folder} has more than one layer for multi-token prediction; the first "
            "drafts every token.",
            stacklevel=2,
        )
    names = {name for name in checkpoint.names if name.startswith(layout.prefix)}
    table = {layout.prefix + name: our for name, our in layout.table.items()}
    config = _text(checkpoint.config)
    return checkpoint.head(
        _experts_joined(checkpoint.state(table, names.difference(further))),
        layers=one_layer(config),
        vocab_size=size_of(config, "vocab_size"),
        form="mtp",
        **layout.settings,
    )


def _layout(checkpoint: Checkpoint) -> _Layout | None:
    """Return the layout of a folder, its numbers filled in; None for another kind of folder."""
    n = int(_text(checkpoint.config).get("num_hidden_layers", 0))
    for layout in LAYOUTS:
        prefix = layout.prefix.format(n=n)
        projection = next(name for name, our in layout.table.items() if our == "fc.")
        if f"{prefix}{projection}weight" in checkpoint.names:
            return layout._replace(prefix=prefix, rest=layout.rest.format(more=n + 1))
    return None


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration of a model's text part."""
    return part_of(config, "text_config", dict) or config


def one_layer(config: dict[str, object]) -> dict[str, object]:
    """Return the configuration of one attention layer of a model's own class."""
    from transformers import CONFIG_MAPPING

    if config.get("model_type") not in CONFIG_MAPPING:  # MiMo: Qwen2 under another name
        layers = select_layers(config)
        return {"model_type": "qwen2", **layers, "num_hidden_layers": 1, "layer_types": None}
    dropped = ("architectures", "auto_map", "quantization_config", "transformers_version")
    layers = {name: value for name, value in config.items() if name not in dropped}
    layers |= {"num_hidden_layers": 1, "layer_types": ["full_attention"]}
    layers |= {"mlp_layer_types": ["sparse"], "first_k_dense_replace": 0}
    return layers | {"mlp_only_layers": [], "decoder_sparse_step": 1}


def _experts_joined(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with those of single experts stacked as transformers has them [E, m, h]."""
    parts: dict[str, dict[int, dict[str, Tensor]]] = {}
    result = dict[str, Tensor]()
    for name, tensor in state.items():
        if (match := _EXPERT.fullmatch(name)) is None:
            result[name] = tensor
        else:
            parts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
    for name, experts in parts.items():
        rows = [experts[i] for i in sorted(experts)]
        both = [torch.cat([row["gate"], row["up"]]) for row in rows]
        result[f"{name}.gate_up_proj"] = torch.stack(both)
        result[f"{name}.down_proj"] = torch.stack([row["down"] for row in rows])
    return result
