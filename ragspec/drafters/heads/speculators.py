"""The layout of vLLM's `speculators`: EAGLE-3, P-EAGLE, DFlash, DSpark, multi-token prediction.

The layer ids that it names are the taps of `HeadConfig`. vLLM reads this layout.
"""

from typing import Any

from torch import Tensor

from ragspec.drafters.heads.checkpoint import NAMES, TAP_NAMES, Checkpoint, select_layers, to_file
from ragspec.drafters.heads.config import JOINS, HeadWeights, norms_of, part_of, size_of, taps_at
from ragspec.drafters.heads.head import DraftHead, default_taps
from ragspec.drafters.heads.mtp import MIMO_NAMES, one_layer
from ragspec.errors import UnsupportedModelError
from ragspec.verification.causal import CausalTarget

_BLOCK_NAMES = NAMES | {
    "hidden_norm.": "state_norm.",
    "markov_head.markov_w1.": "markov_in.",
    "markov_head.markov_w2.": "markov_out.",
}
_MTP_NAMES = NAMES | {f"mtp_layers.0.{name}": ours for name, ours in MIMO_NAMES.items()}
KINDS = {  # with the class of the model that vLLM runs
    "eagle3": ("Eagle3DraftModel", TAP_NAMES),
    "peagle": ("PEagleDraftModel", TAP_NAMES | {"mask_hidden": "mask_taps"}),
    "dflash": ("DFlashDraftModel", _BLOCK_NAMES),
    "dspark": ("DSparkDraftModel", _BLOCK_NAMES),
    "mtp": ("MTPDraftModel", _MTP_NAMES),
}
_UNREAD = ("verifier_norm.", "verifier_lm_head.", "confidence_head.")


def matches(checkpoint: Checkpoint) -> bool:
    """Return whether a folder has this layout."""
    return "speculators_model_type" in checkpoint.config


def read(checkpoint: Checkpoint, target: CausalTarget | None) -> HeadWeights:
    """Return the head of a folder; see `files.read_head`."""
    config, kind = checkpoint.config, checkpoint.config["speculators_model_type"]
    if kind not in list(KINDS):  # a list or an object has no hash
        raise UnsupportedModelError(
            f"{checkpoint.folder} holds a speculator of kind {kind!r}; expected one of "
            f"{', '.join(map(repr, KINDS))}. Use a head of one of these."
        )
    names = {name for name in checkpoint.names if not name.startswith(_UNREAD)}
    markov = config.get("markov_head_type")
    if markov not in (None, "vanilla") and any(name.startswith("markov_head.") for name in names):
        raise UnsupportedModelError(
            f"{checkpoint.folder} holds a Markov head of type {markov!r}; expected 'vanilla'."
        )
    state = checkpoint.state(KINDS[kind][1], names)
    inner: dict[str, Any] = part_of(config, "transformer_layer_config", dict)
    named = {"model_type": inner.get("model_type", "qwen3")}
    layers = one_layer(inner | named) if kind == "mtp" else select_layers(inner) | named
    vocab_size = size_of(inner, "vocab_size")
    common: dict[str, Any] = {"layers": layers, "vocab_size": vocab_size, "form": kind}
    if kind == "mtp":
        feeds_norm = bool(part_of(config, "ragspec", dict).get("feeds_norm", True))
        return checkpoint.head(state, feeds_norm=feeds_norm, **common)
    common["target_size"] = config.get("target_hidden_size") or size_of(layers, "hidden_size")
    if "markov_in.weight" in state:
        common["markov_rank"] = state["markov_in.weight"].shape[1]
    return checkpoint.head(state, **common, **_form(config, kind, target))


def to_layout(head: DraftHead) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Return the configuration and the tensors of a head in this layout."""
    config = head.config
    kind = config.form
    model, table = KINDS[kind]
    unused = "fc_norm." if config.tap_norm == "all" else "input_norm."
    tensors = to_file(head, {name: ours for name, ours in table.items() if name != unused})
    if config.state_first:  # there the token comes first
        name = "mtp_layers.0.input_proj.weight"
        tensors[name] = tensors[name].roll(-config.hidden_size, 1)
    count = 5 if config.recurrent else config.slots
    record: dict[str, object] = {
        "architectures": [model],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": count}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": config.layers | {"vocab_size": config.vocab_size},
    }
    if kind != "mtp":
        record |= {
            "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
            "target_hidden_size": config.target_size,
            "mask_token_id": config.mask_token,
        }
    if config.join == "inject":
        record |= {
            "aux_hidden_state_layer_ids": list(config.taps),
            "block_size": config.masks + 1,
            "sample_from_anchor": config.from_anchor,
            "sliding_window_non_causal": not config.causal_windows,
            "markov_rank": config.markov_rank,
            "enable_confidence_head": False,
        }
    elif config.join == "attend":
        record |= {
            "eagle_aux_hidden_state_layer_ids": list(config.taps),
            "norm_before_residual": config.residual_norm,
            "norm_before_fc": config.tap_norm == "all",
            "fc_norm": config.tap_norm == "each",
            "norm_output": config.feeds_norm,
        }
    return record, tensors


def _form(config: dict[str, Any], kind: str, target: CausalTarget | None) -> dict[str, Any]:
    """Return the settings of a head that are of its kind."""
    mask, name = config.get("mask_token_id"), "aux_hidden_state_layer_ids"
    if JOINS[kind] == "inject":
        if not (taps := taps_at(config, name)):
            raise ValueError(f"its {name} are missing")
        anchor = bool(config.get("sample_from_anchor", kind == "dspark"))
        slots = size_of(config, "block_size") - (not anchor)
        form = {"taps": taps, "slots": slots, "mask_token": mask, "from_anchor": anchor}
        return form | {"causal_windows": not config.get("sliding_window_non_causal")}
    form = norms_of(config) | {"taps": taps_at(config, f"eagle_{name}") or default_taps(target)}
    if kind == "peagle":
        methods = part_of(part_of(config, "speculators_config", dict), "proposal_methods", list)
        form |= {"slots": size_of([*methods, {}][0], "speculative_tokens"), "mask_token": mask}
    return form
