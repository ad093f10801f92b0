"""Synthetic checkpoints of draft heads in published layouts, and what published code makes of them.

Weights and inputs are sines of their index, so that they are the same everywhere. The logits were
recorded once with the modelling code of EAGLE (cb7e084) and `speculators` (c05b95b), beside the
project.
"""

from __future__ import annotations

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
TOKENS = torch.arange(DRAFTED) * 2 + 3


def sines(name: str, *shape: int) -> torch.Tensor:
    """Return numbers that depend on a name and a shape alone, near 1 for the weights of norms."""
    count, phase = math.prod(shape), float(sum(map(ord, name)))
    numbers = (torch.arange(count, dtype=torch.float64) * 0.7 + phase).sin().float() * 0.2
    return numbers.reshape(shape) + float("norm" in name and name.endswith("weight"))


def layer(prefix: str, width: int = H, *, wide: bool = False) -> dict[str, torch.Tensor]:
    """Return the weights of a Llama layer; `wide` has EAGLE-3's attention and norms."""
    inputs = 2 * width if wide else width
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (width, inputs),
        "self_attn.k_proj": (width * KV // HEADS, inputs),
        "self_attn.v_proj": (width * KV // HEADS, inputs),
        "self_attn.o_proj": (width, width),
        "mlp.gate_proj": (F, width),
        "mlp.up_proj": (F, width),
        "mlp.down_proj": (width, F),
        "post_attention_layernorm": (width,),
    }
    shapes |= {"input_layernorm": (width,), "hidden_norm": (width,)} if wide else {}
    return {f"{prefix}{n}.weight": sines(f"{n}.weight", *shape) for n, shape in shapes.items()}


def reduced() -> dict[str, torch.Tensor]:
    """Return own rows of logits, and the tokens that they are for."""
    mask = torch.zeros(V, dtype=torch.bool)
    mask[TOKENS] = True
    rows = sines("lm_head.weight", DRAFTED, H)
    return {"lm_head.weight": rows, "d2t": TOKENS - torch.arange(DRAFTED), "t2d": mask}


def eagle1(bias: bool) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return EAGLE-1's configuration and weights."""
    weights = layer("layers.0.") | {"fc.weight": sines("fc.weight", H, 2 * H)}
    weights |= {"fc.bias": sines("fc.bias", H)} if bias else {}
    return SIZES | {"bias": bias, "model_type": "llama"}, weights


def eagle3() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return EAGLE-3's configuration and weights."""
    weights = layer("midlayer.", wide=True) | {"fc.weight": sines("fc.weight", H, 3 * H)}
    weights |= {"norm.weight": sines("norm.weight", H)} | reduced()
    return SIZES | {"draft_vocab_size": DRAFTED, "rope_theta": 50000.0}, weights


def speculators(
    kind: str = "llama", **flags: bool
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the configuration and weights of a head of EAGLE-3 as `speculators` has it."""
    weights = layer("layers.0.", wide=True) | {"fc.weight": sines("fc.weight", H, 3 * H)}
    weights |= {"norm.weight": sines("norm.weight", H)} | reduced()
    weights |= {"embed_tokens.weight": sines("embed_tokens.weight", V, H)}
    if kind == "qwen3":
        for name in ("q_norm", "k_norm"):
            key = f"self_attn.{name}.weight"
            weights[f"layers.0.{key}"] = sines(key, H // HEADS)
    if flags.get("norm_before_fc"):
        weights["input_norm.weight"] = sines("input_norm.weight", 3 * H)
    if flags.get("fc_norm"):
        names = [f"fc_norm.{i}.weight" for i in range(3)]
        weights |= {name: sines(name, H) for name in names}
    inner = SIZES | {"model_type": kind, "head_dim": H // HEADS}
    config = {"speculators_model_type": "eagle3", "transformer_layer_config": inner, **flags}
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": DRAFTED}
    return config | taps, weights


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
