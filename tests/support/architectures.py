"""Tiny random models of many architectures, and the expected verdict of the probe on each.

Two layers (more where the pattern of layers needs them), 32 wide, 97 tokens: enough for equality
of logits and tokens, never for speed. Windows and chunks are 8, so that short prompts cross them.
"""

import copy
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

VOCAB = 97
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,  # the usual 0.02 gives nearly flat distributions
    "bos_token_id": VOCAB - 1,
    "eos_token_id": None,  # every text has its full length
    "pad_token_id": VOCAB - 1,
    "tie_word_embeddings": False,
}
HEAD = {"head_dim": 8}
WINDOW = {"sliding_window": 8}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}


@dataclass(frozen=True)
class Architecture:
    """Settings beside the common ones. experts: routed, so kept in float32 (grouped products
    lack float64 on the CPU). mode: the verdict that is expected of the probe."""

    settings: dict[str, Any] = field(default_factory=dict)
    experts: bool = False
    mode: str = "tree"


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "qwen2": Architecture(),
    "qwen3": Architecture(HEAD),
    "mistral": Architecture(WINDOW),
    "ministral": Architecture(WINDOW | HEAD | MIXED),
    "gemma": Architecture(HEAD),
    "gemma2": Architecture(HEAD | WINDOW | MIXED | {"query_pre_attn_scalar": 8}),
    "gemma3_text": Architecture(HEAD | WINDOW | MIXED | {"query_pre_attn_scalar": 8}),
    "phi": Architecture(),
    "phi3": Architecture(WINDOW),
    "gpt2": Architecture(),
    "gpt_neox": Architecture(),
    "gpt_bigcode": Architecture(),
    "gptj": Architecture({"rotary_dim": 4}),
    "codegen": Architecture({"rotary_dim": 4}),
    "falcon": Architecture(),
    "olmo": Architecture(),
    "olmo2": Architecture(),
    "olmo3": Architecture(WINDOW | MIXED),
    "cohere": Architecture(),
    "cohere2": Architecture(WINDOW | HEAD | MIXED),
    "granite": Architecture(),
    "glm": Architecture(HEAD),
    "glm4": Architecture(HEAD),
    "smollm3": Architecture(),
    "opt": Architecture({"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "starcoder2": Architecture(WINDOW),
    "stablelm": Architecture(),
    "persimmon": Architecture(),
    "helium": Architecture(HEAD),
    "nemotron": Architecture(HEAD),
    "ernie4_5": Architecture(HEAD),
    "exaone4": Architecture(HEAD | WINDOW | MIXED),
    "seed_oss": Architecture(HEAD),
    "apertus": Architecture(),
    "minicpm3": Architecture(LATENT),
    "mixtral": Architecture(WINDOW | LOCAL, experts=True),
    "qwen2_moe": Architecture(EXPERTS | {"shared_expert_intermediate_size": 16}, experts=True),
    "qwen3_moe": Architecture(EXPERTS | HEAD, experts=True),
    "olmoe": Architecture(EXPERTS, experts=True),
    "gpt_oss": Architecture(HEAD | WINDOW | MIXED | LOCAL, experts=True),
    "deepseek_v2": Architecture(LATENT | ROUTED, experts=True),
    "deepseek_v3": Architecture(LATENT | ROUTED, experts=True),
    "glm4_moe_lite": Architecture(LATENT | ROUTED, experts=True),
    "llama4_text": Architecture(
        HEAD
        | {
            "num_hidden_layers": 4,
            "layer_types": ["chunked_attention"] * 3 + ["full_attention"],
            "attention_chunk_size": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
        },
        experts=True,
        mode="chain",
    ),
    "bloom": Architecture(mode="chain"),
    "mpt": Architecture(mode="chain"),
    "gpt_neo": Architecture(
        {"attention_types": [[["global", "local"], 1]], "window_size": 8}, mode="chain"
    ),
    "qwen3_next": Architecture(
        EXPERTS | HEAD | DELTA | {"shared_expert_intermediate_size": 16}, experts=True, mode="chain"
    ),
    "qwen3_5_text": Architecture(HEAD | DELTA, mode="chain"),
    "olmo_hybrid": Architecture(HEAD | DELTA, mode="chain"),
}


def build(name: str, dtype: torch.dtype | None = None, seed: int = 0) -> Any:
    """Return the model in eval mode, in float64 (routed experts: float32) by default.

    Equal calls return the same object. To change it, copy it with `copy.deepcopy`.
    """
    exact = torch.float32 if ARCHITECTURES[name].experts else torch.float64
    return _build(name, dtype or exact, seed)


@cache
def _build(name: str, dtype: torch.dtype, seed: int) -> Any:
    return make(name, dtype, seed, **ARCHITECTURES[name].settings)


def make(
    name: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    experts: str | None = None,
    **settings: Any,
) -> Any:
    """Return a new model of a type in eval mode; settings: those beside or instead of `COMMON`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(name, **copy.deepcopy(COMMON | settings))
    inputs = {"experts_implementation": experts} if experts else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, **inputs).eval()
