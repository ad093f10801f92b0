"""Synthetic checkpoints of draft heads in published layouts, and the outputs of published code.

Weights and inputs are sines of their index, so that they are the same everywhere. The logits were
recorded once with the modelling code of EAGLE (cb7e084), `speculators` (c05b95b), DFlash (44947fb),
Medusa (e2a5d20) and Hydra (3f39fbd), beside the project.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

H, V, F, HEADS, KV, DRAFTED = 64, 97, 96, 4, 2, 40
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": F,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
}
Checkpoint = tuple[dict[str, Any], dict[str, torch.Tensor]]  # a configuration, and weights
PREFIX = "prefix_embeding_layer."
TOKENS = torch.arange(DRAFTED) * 2 + 3
NORMS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


def sines(name: str, *shape: int) -> torch.Tensor:
    """Return numbers that depend on a name and a shape alone, near 1 for the weights of norms."""
    count, phase = math.prod(shape), float(sum(map(ord, name)))
    numbers = (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().float() * 0.2
    return numbers.reshape(shape) + float("norm" in name and name.endswith("weight"))


def spread(values: torch.Tensor) -> list[float]:
    """Return six numbers from everywhere in a tensor, as they were recorded."""
    result: list[float] = values.flatten()[:: max(1, values.numel() // 6)][:6].tolist()
    return result


def layer(prefix: str, *, wide: bool = False, kind: str = "llama") -> dict[str, torch.Tensor]:
    """Return the weights of a layer of Llama or Qwen3; `wide` has EAGLE-3's attention and norms."""
    inputs = 2 * H if wide else H
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (H, inputs),
        "self_attn.k_proj": (H * KV // HEADS, inputs),
        "self_attn.v_proj": (H * KV // HEADS, inputs),
        "self_attn.o_proj": (H, H),
        "mlp.gate_proj": (F, H),
        "mlp.up_proj": (F, H),
        "mlp.down_proj": (H, F),
        "post_attention_layernorm": (H,),
    }
    shapes |= {"input_layernorm": (H,), "hidden_norm": (H,)} if wide else {}
    if kind == "qwen3":
        shapes |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (H // HEADS,))
    return {f"{prefix}{n}.weight": sines(f"{n}.weight", *shape) for n, shape in shapes.items()}


def reduced() -> dict[str, torch.Tensor]:
    """Return rows of logits, and the tokens that they are for."""
    mask = torch.zeros(V, dtype=torch.bool)
    mask[TOKENS] = True
    rows = sines("lm_head.weight", DRAFTED, H)
    return {"lm_head.weight": rows, "d2t": TOKENS - torch.arange(DRAFTED), "t2d": mask}


def eagle1(bias: bool) -> Checkpoint:
    """Return EAGLE-1's configuration and weights."""
    weights = layer("layers.0.") | {"fc.weight": sines("fc.weight", H, 2 * H)}
    weights |= {"fc.bias": sines("fc.bias", H)} if bias else {}
    return SIZES | {"bias": bias, "model_type": "llama"}, weights


def eagle3() -> Checkpoint:
    """Return EAGLE-3's configuration and weights."""
    weights = layer("midlayer.", wide=True) | {"fc.weight": sines("fc.weight", H, 3 * H)}
    weights |= {"norm.weight": sines("norm.weight", H)} | reduced()
    return SIZES | {"draft_vocab_size": DRAFTED, "rope_theta": 50000.0}, weights


def speculators(kind: str = "llama", **flags: bool) -> Checkpoint:
    """Return the configuration and weights of a head of EAGLE-3 as `speculators` has it."""
    weights = layer("layers.0.", wide=True, kind=kind) | reduced()
    weights |= {"fc.weight": sines("fc.weight", H, 3 * H), "norm.weight": sines("norm.weight", H)}
    weights |= {"embed_tokens.weight": sines("embed_tokens.weight", V, H)}
    if flags.get("norm_before_fc"):
        weights["input_norm.weight"] = sines("input_norm.weight", 3 * H)
    if flags.get("fc_norm"):
        names = [f"fc_norm.{i}.weight" for i in range(3)]
        weights |= {name: sines(name, H) for name in names}
    inner = SIZES | {"model_type": kind, "head_dim": H // HEADS}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": inner, **flags}
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": DRAFTED}
    return config | taps, weights


def eagle31() -> Checkpoint:
    """Return the head of `speculators("qwen3", **NORMS)` in EAGLE's layout."""
    config, weights = speculators("qwen3", **NORMS)
    return config["transformer_layer_config"] | {"eagle_config": NORMS}, weights


def peagle() -> Checkpoint:
    """Return the configuration and weights of a P-EAGLE as `speculators` has it."""
    config, weights = speculators()
    proposals = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}]}
    config |= {"speculators_model_type": "peagle", "mask_token_id": 5}
    mask = {"mask_hidden": sines("mask_hidden", 1, 1, 3 * H)}
    return config | {"speculators_config": proposals}, weights | mask


def dflash(kind: str, **flags: Any) -> Checkpoint:
    """Return a DFlash or DSpark of `speculators`, whose second layer has a window."""
    _, weights = zlab()
    inner = SIZES | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": H // HEADS}
    inner |= {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 6}
    config = {"speculators_model_type": kind, "transformer_layer_config": inner, **flags}
    config |= {"aux_hidden_state_layer_ids": [1, 2], "draft_vocab_size": DRAFTED}
    config |= {"block_size": 4, "mask_token_id": 5}
    weights |= reduced() | {"embed_tokens.weight": sines("embed_tokens.weight", V, H)}
    if kind == "dspark":
        weights["markov_head.markov_w1.weight"] = sines("markov_w1.weight", V, 6) * 5.0
        weights["markov_head.markov_w2.weight"] = sines("markov_w2.weight", DRAFTED, 6) * 5.0
        weights["confidence_head.proj.weight"] = sines("proj.weight", 1, H + 6)
        weights["confidence_head.proj.bias"] = sines("proj.bias", 1)
    return config, weights


def zlab() -> Checkpoint:
    """Return the configuration and weights of a DFlash of z-lab, of two layers."""
    weights = {"fc.weight": sines("fc.weight", H, 2 * H)}
    for number in range(2):
        prefix = f"layers.{number}."
        weights |= layer(prefix, kind="qwen3")
        weights[f"{prefix}input_layernorm.weight"] = sines("input_layernorm.weight", H)
    weights |= {name: sines(name, H) for name in ("norm.weight", "hidden_norm.weight")}
    config = SIZES | {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": H // HEADS}
    config |= {"layer_types": ["full_attention"] * 2, "block_size": 4, "num_target_layers": 3}
    return config | {"dflash_config": {"mask_token_id": 5, "target_layer_ids": [0, 1]}}, weights


def medusa(prefix: str = "", **settings: object) -> Checkpoint:
    """Return the configuration and weights of a Medusa of three heads."""
    weights = {}
    for head in range(3):
        shapes = {"0.linear.weight": (H, H), "0.linear.bias": (H,), "1.weight": (V, H)}
        for name, shape in shapes.items():
            weights[f"{prefix}{head}.{name}"] = sines(f"{head}.{name}", *shape)
    return {"medusa_num_heads": 2, "medusa_num_layers": 1} | settings, weights


def hydra(layered: bool) -> Checkpoint:
    """Return the configuration and weights of a Hydra, or a Hydra++, of three heads."""
    weights = layer(f"{PREFIX}layers.0.") if layered else {}
    if layered:
        for name in ("layers.0.input_layernorm.weight", "norm.weight"):
            weights[f"{PREFIX}{name}"] = sines(name, H)
        weights[f"{PREFIX}embed_tokens.weight"] = sines("embed_tokens.weight", V, H)
    for head in range(3):
        block = f"hydra_mlp.{head}.{int(layered)}."
        wide: tuple[int, ...] = (H, (head + 2) * H)
        rows = f"hydra_lm_head.{head}.{'1.' * layered}"
        shapes = {"linear.weight": wide, "res_connection.weight": wide}
        shapes |= dict.fromkeys(("linear.bias", "res_connection.bias"), (H,))
        weights |= {block + name: sines(f"{head}.{name}", *each) for name, each in shapes.items()}
        weights |= {f"{rows}weight": sines(f"{head}.rows", V, H), f"{rows}bias": sines("bias", V)}
    arch = "prefix-mlp" if layered else "mlp"
    return {"hydra_num_heads": 3, "hydra_head_arch": arch, "grounded_heads": True}, weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    """Write a checkpoint to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(
        {name: each.contiguous() for name, each in weights.items()}, folder / "model.safetensors"
    )
    return folder


IDS = torch.arange(8)[None] * 5 + 2
INPUTS: dict[str, torch.Tensor] = {
    "state": sines("state", 1, 8, H) * 5.0,
    "taps": sines("taps", 1, 8, 3 * H) * 5.0,
    "embeddings": sines("embed_tokens.weight", V, H),
}
