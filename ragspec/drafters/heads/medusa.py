"""The layouts of Medusa and of Hydra, alone or inside the checkpoint of their model.

Their configurations say little: the numbers of heads and of blocks are those of the tensors, as the
first published files of Medusa name fewer heads than they have. The layer of a Hydra++ has the
settings of its target's layers, which our files repeat.
"""

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from ragspec.drafters.heads.checkpoint import Checkpoint, copied_layer
from ragspec.drafters.heads.config import HeadConfig, HeadWeights, part_of
from ragspec.drafters.heads.head import DraftHead, text_of
from ragspec.errors import UnsupportedModelError
from ragspec.needs import LAST
from ragspec.types import PreTrainedConfig
from ragspec.verification.causal import CausalTarget

_INSIDE, _LAYER = "medusa_head.", "prefix_embeding_layer."
_SETTINGS = "prefix_layer"
_BLOCK = re.compile(
    rf"(?:{_INSIDE}|hydra_mlp\.)?(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)"
)
_ROWS = re.compile(rf"(?:{_INSIDE})?(\d+)\.\d+\.(weight)")
_HYDRA_ROWS = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has Medusa's or Hydra's tensors."""
    return any(_BLOCK.fullmatch(name) for name in checkpoint.names)


def read(checkpoint: Checkpoint, target: CausalTarget | None) -> HeadWeights:
    """Return the head of a folder; see `files.read_head`."""
    inside = any(name.startswith(_INSIDE) for name in checkpoint.names)
    names = {name for name in checkpoint.names if name.startswith(_INSIDE) or not inside}
    names.discard(f"{_LAYER}embed_tokens.weight")  # its layer reads states
    ours = _renamed(names)
    state = {ours[name]: each for name, each in checkpoint.tensors(names).items()}
    rows, first = state["outputs.0.weight"], state["blocks.0.0.linear.weight"]
    (vocab_size, width), prefix = rows.shape, "layers.norm.weight" in state
    grounded = first.shape[1] > width
    layer, offset = map(checkpoint.config.get, (_SETTINGS, "hidden_state_offset"))
    taps = part_of(part_of(checkpoint.config, "ragspec", dict), "taps", list)
    last = int(text_of(target).num_hidden_layers) - offset if offset else LAST
    return checkpoint.head(
        state,
        layers=layer or prefix_layer(text_of(target)) if prefix else {"hidden_size": width},
        embedding_size=first.shape[1] - width if grounded else width,
        vocab_size=vocab_size,
        taps=tuple(taps) or (last,),
        form="hydra++" if prefix else "hydra" if grounded else "medusa",
        bias="outputs.0.bias" in state,
        slots=_count(state, r"outputs\.\d+\.weight"),
        blocks=_count(state, r"blocks\.0\.\d+\.linear\.weight"),
    )


def to_layout(head: DraftHead) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the configuration and the tensors of a head in its layout."""
    config = head.config
    kind = "hydra" if config.join == "path" else "medusa"
    about: dict[str, Any] = {f"{kind}_num_heads": config.slots, f"{kind}_num_layers": config.blocks}
    if kind == "hydra":
        about["hydra_head_arch"] = "prefix-mlp" if config.prefix else "mlp"
        about |= {"grounded_heads": True} | ({_SETTINGS: config.layers} if config.prefix else {})
    return about, {_theirs(name, config): each for name, each in head.state_dict().items()}


def _renamed(names: Iterable[str]) -> dict[str, str]:
    """Return the names of `MedusaHead` by those of a file; others stay, and are left over."""
    blocks = {name: match for name in names if (match := _BLOCK.fullmatch(name))}
    steps = sorted({int(match[2]) for match in blocks.values()})  # a Hydra++ counts dropouts too
    result = dict[str, str]()
    for name in names:
        if (match := blocks.get(name)) is not None:
            layer = match[3].replace("res_connection", "shortcut")
            result[name] = f"blocks.{match[1]}.{steps.index(int(match[2]))}.{layer}.{match[4]}"
        elif (match := _ROWS.fullmatch(name) or _HYDRA_ROWS.fullmatch(name)) is not None:
            result[name] = f"outputs.{match[1]}.{match[2]}"
        else:
            result[name] = name.replace(_LAYER, "layers.")
    return result


def _theirs(name: str, config: HeadConfig) -> str:
    """Return the name in a file of a tensor of `MedusaHead`."""
    kind, slot, *rest = name.split(".")
    hydra = config.join == "path"
    if kind == "outputs":
        rows = f"hydra_lm_head.{slot}{'.1' * config.prefix}" if hydra else f"{slot}.{config.blocks}"
        return f"{rows}.{rest[0]}"
    if kind == "blocks":
        block, layer, part = rest
        place = 2 * int(block) + 1 if config.prefix else block
        layer = layer.replace("shortcut", "res_connection")
        return f"{'hydra_mlp.' * hydra}{slot}.{place}.{layer}.{part}"
    return name.replace("layers.", _LAYER, 1)


def _count(names: Iterable[str], pattern: str) -> int:
    return sum(re.fullmatch(pattern, name) is not None for name in names)


def prefix_layer(text: PreTrainedConfig) -> dict[str, object]:
    """Return the configuration of the layer of a Hydra++, for a target with this one.

    Raises:
        UnsupportedModelError: The target's layers are not like Llama's.
    """
    layer: dict[str, Any] = copied_layer(text) | {"model_type": "llama"}
    sized = {"hidden_size", "intermediate_size"} <= layer.keys()
    if not sized or "full_attention" in layer.get("rope_parameters", {}):
        raise UnsupportedModelError(
            f"the layer of a Hydra++ is like those of its target; got one of {text.model_type}, "
            "expected Llama's kind. Use a Hydra without it."
        )
    return layer
