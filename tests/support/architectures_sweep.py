"""A check of every causal model type of the installed transformers, with a tiny model of each.

Its test runs a few; `python -m pytest --slow tests/support` runs all, with every new release of
transformers. A type that cannot be built needs a line in `OF_MODEL`.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ragspec.engine.engine import Engine
from ragspec.errors import UnsupportedModelError
from ragspec.models.supported import check_scope
from ragspec.verification.causal import CausalTarget
from ragspec.verification.probe import probe, probe_target
from tests.support import tiny
from tests.support.architectures import ARCHITECTURES, COMMON, VOCAB
from tests.support.architectures import MIXED as WINDOWED
from tests.support.noisy import NoisyTrees

TEXTS = (13, 21)  # tokens of the prompts, beyond every window and chunk
NEW = 24
BUDGET = 9
MOST_WEIGHTS = 100_000  # of one tensor of a model that counts as tiny
MOST_LAYERS = 6

# The names of sizes in configurations, by the value that they get.
_SIZES: tuple[tuple[Any, str], ...] = (
    (VOCAB, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
    (VOCAB - 1, "bos_token_id pad_token_id"),
    (None, "eos_token_id"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length"),
    (
        32,
        "hidden_size d_model n_embd emb_dim embedding_size embedding_dim lru_width "
        "input_embedding_size output_embedding_size word_embed_proj_dim attention_hidden_size",
    ),
    (
        48,
        "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dff dim_ff d_inner "
        "ffn_hidden_size feed_forward_size intermediate_size_mlp dense_intermediate_size",
    ),
    (
        16,
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size "
        "expert_ffn_hidden_size q_lora_rank kv_lora_rank o_lora_rank mamba_d_state hc_lowrank "
        "gated_norm_rank hidden_size_per_layer_input laurel_rank router_hidden_size mamba_dt_rank "
        "ssm_state_size adapter_rank index_head_dim state_size time_step_rank",
    ),
    (
        8,
        "head_dim v_head_dim qk_rope_head_dim qk_nope_head_dim linear_head_dim kv_channels d_rel "
        "linear_key_head_dim linear_value_head_dim swa_head_dim d_head dim_head global_head_dim "
        "attention_head_size query_pre_attn_scalar attention_head_dim sliding_window window_size "
        "attention_chunk_size attention_window_size local_attention sliding_window_size "
        "mamba_chunk_size chunk_size floor_scale mem_len rel_extent",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads "
        "decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads "
        "swa_num_attention_heads linear_num_value_heads linear_num_heads num_experts "
        "num_local_experts n_routed_experts moe_num_experts index_topk rotary_dim",
    ),
    (
        2,
        "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
        "num_encoder_layers num_decoder_layers num_key_value_heads num_kv_heads "
        "swa_num_key_value_heads linear_num_key_heads num_experts_per_tok num_experts_per_token "
        "moe_topk moe_k n_group num_expert_group num_codebooks max_window_layers zero_expert_num",
    ),
    (
        1,
        "topk_group n_shared_experts num_shared_experts moe_num_shared_experts "
        "first_k_dense_replace num_nextn_predict_layers",
    ),
    (32, "index_n_heads"),  # fewer give keys of equal score, among which any may be picked
    (0.3, "initializer_range init_std initializer_factor"),
)
SIZES = {name: value for value, names in _SIZES for name in names.split()}
_MISSING = object()
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1}
MIXED = {"layer_types": ["linear_attention", "full_attention"]}
GEMMA: dict[str, Any] = {"global_head_dim": 8, **WINDOWED}
SHARED = GEMMA | {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
SHARED["layer_types"] = WINDOWED["layer_types"] * 2
SPARSE = SHARED | {
    "intermediate_size": [48] * 4,
    "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
}
SLIDING = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
ZAMBA = {
    "num_hidden_layers": 4,
    "layers_block_type": ["linear_attention", "hybrid"] * 2,
    "attention_hidden_size": 64,
    "attention_head_dim": 16,
    "num_key_value_heads": 4,
}
QSA = {
    "layer_types": ["linear_attention", "indexed_attention"],
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
PICTURES = {"num_hidden_layers": 2, "image_size": 56, "patch_size": 14, "crop_size": 56}
SOUNDS = {"num_blocks": 2, "ext_pw_out_channel": 32, "nemo_conv_channels": 16}
SOUNDS["depthwise_separable_out_channel"] = 32
TOWERS = {"audio_config": TOWER | SOUNDS, "vision_config": TOWER | PICTURES}
AXIAL = {"axial_pos_shape": (16, 16), "axial_pos_embds_dim": (16, 16)}

# Settings that a type needs beside the sizes.
OF_MODEL: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dots3_note": SLIDING,
    "dots3_note_text": SLIDING,
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3n": SPARSE,
    "gemma3n_text": SPARSE,
    "gemma4": GEMMA,
    "gemma4_text": SHARED,
    "gemma4_unified": GEMMA,
    "gemma4_unified_text": GEMMA,
    "granitemoehybrid": MAMBA | MIXED,
    "jamba": {"num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 1},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "index_n_heads": 2,
        "index_block_size": 4,
        "index_topk_blocks": 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
    },
    "phi4_multimodal": TOWERS,
    "qwen4_exp": QSA,
    "qwen4_exp_text": QSA,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": AXIAL,
    "roc_bert": {
        "pronunciation_vocab_size": VOCAB,
        "pronunciation_embed_dim": 32,
        "shape_vocab_size": VOCAB,
        "shape_embed_dim": 32,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": ZAMBA,
    "zamba2": ZAMBA | {"n_mamba_heads": 4, "mamba_headdim": 16, "kv_channels": 8},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass(frozen=True)
class Finding:
    """The result of one model type.

    mode: "tree", "chain", "refused", or "not built". reason: why not trees. plain: whether
    our plain greedy text is that of transformers' `generate`. drafted: whether drafts left it as
    it is. accepted: nodes of drafts in it. half: the mode in bfloat16.
    """

    model_type: str
    mode: str
    reason: str = ""
    plain: bool = True
    drafted: bool = True
    accepted: int = 0
    half: str = "refused"

    @property
    def right(self) -> bool:
        """Whether the type was refused, or gives the text that it should, drafted or not."""
        return self.plain and self.drafted and self.half in (self.mode, "refused")


class NotBuilt(Exception):
    """A model type without a tiny model, or with a `generate` that fails."""


def model_types() -> list[str]:
    """Return every type that AutoModelForCausalLM knows."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def examine(model_type: str) -> Finding:
    """Return the finding of a type."""
    try:
        model = build(model_type)
        texts = [tiny.prompt(n, seed=n) for n in TEXTS]
        current = [_greedy(model, text) for text in texts]
    except NotBuilt as error:
        return Finding(model_type, "not built", str(error))
    try:
        check_scope(model)
        verdict, target = probe(CausalTarget(model)), probe_target(CausalTarget(model))
    except UnsupportedModelError as error:
        return Finding(model_type, "refused", str(error))
    plain = [out.tokens for out in Engine(target, drafter=None).generate(texts, max_new_tokens=NEW)]
    truths = {tuple(text): out for text, out in zip(texts, plain, strict=True)}
    engine = Engine(target, drafter=NoisyTrees(truths), budget=BUDGET)
    drafted = engine.generate(texts, max_new_tokens=NEW)
    return Finding(
        model_type,
        verdict.mode,
        "" if verdict.mode == "tree" else verdict.reason,
        plain == current,
        [out.tokens for out in drafted] == plain and not any(out.report.faults for out in drafted),
        sum(out.report.accepted for out in drafted),
        probe(CausalTarget(model.to(torch.bfloat16))).mode,
    )


def build(model_type: str) -> Any:
    """Return a tiny model in eval mode, in float64 where it can. Raises NotBuilt."""
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):  # so that one that is not tiny after all takes no memory
            _expect_tiny(AutoModelForCausalLM.from_config(tiny_config(model_type)))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            instance = AutoModelForCausalLM.from_config(
                tiny_config(model_type), dtype=torch.float64
            )
            _stir(instance)
    except NotBuilt:
        raise
    except Exception as error:  # an outdated configuration may raise any
        raise NotBuilt(f"{type(error).__name__}: {error}") from error
    model = instance.eval()
    try:
        model(input_ids=torch.tensor([[1, 2, 3]]))
    except Exception:  # grouped products and some states know no float64
        model = model.float()
    return model


def tiny_config(model_type: str) -> Any:
    """Return a configuration of a few layers, 32 wide: of the text model where it is one alone."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    if model_type in ARCHITECTURES:
        return AutoConfig.for_model(model_type, **COMMON | ARCHITECTURES[model_type].settings)
    default = AutoConfig.for_model(model_type)
    text = default.get_text_config(decoder=True)
    used = text if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING else default
    return type(used)(**_tiny(used) | OF_MODEL.get(model_type, {}))


def _tiny(config: Any) -> dict[str, Any]:
    """Return settings of the type of a configuration that make it tiny."""
    from transformers import PreTrainedConfig

    known = config.to_dict()
    default = {name: _get(config, name) for name in [*SIZES, *known]}
    record = {
        name: value
        for name, value in SIZES.items()
        if (name in known or default[name] is not _MISSING)
        and not isinstance(getattr(type(config), name, None), property)  # it is derived
    }
    for name, part in default.items():
        if isinstance(part, PreTrainedConfig):
            record[name] = _tiny(part)
        elif name.endswith("token_id") and isinstance(part, int) and part >= VOCAB:
            record[name] = VOCAB - 2
    if "kv_lora_rank" in record:
        record["num_key_value_heads"] = record["num_attention_heads"]  # latents have no groups
    if "is_decoder" in default:
        record["is_decoder"] = True
    return record | {"tie_word_embeddings": False} | _layers(config)


def _get(config: Any, name: str) -> Any:
    try:
        return getattr(config, name)
    except Exception:  # not there, or it differs from layer to layer
        return _MISSING


def _layers(config: Any) -> dict[str, Any]:
    """Return one layer of each kind that the lists of a configuration tell apart."""
    default = config.to_dict()
    count = getattr(config, "num_hidden_layers", 0)
    lists = {k: v for k, v in default.items() if isinstance(v, list) and len(v) == count > 2}
    if not lists:
        return {}
    kinds = [str(kind) for kind in zip(*lists.values(), strict=True)]
    firsts = sorted({kinds.index(kind) for kind in kinds})[:MOST_LAYERS]
    firsts = firsts if len(firsts) > 1 else firsts * 2
    record: dict[str, Any] = {k: [v[i] for i in firsts] for k, v in lists.items()}
    named = [n for n in ("num_hidden_layers", "num_layers", "n_layer") if n in default]
    return record | dict.fromkeys(named, len(firsts))


def _expect_tiny(model: Any) -> None:
    for name, weight in model.named_parameters():
        if weight.numel() > MOST_WEIGHTS:
            raise NotBuilt(f"{name} has the shape {tuple(weight.shape)}, which is not tiny")


def _stir(model: Any) -> None:
    """Add random values to weights that are all equal, so that each affects the logits."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.is_floating_point() and weight.numel() and weight.std(correction=0) == 0:
                weight += 0.3 * torch.randn_like(weight)


def _greedy(model: Any, text: list[int]) -> list[int]:
    """Return the greedy text of transformers. Raises NotBuilt."""
    try:
        return tiny.greedy(model, text, NEW)
    except Exception as error:  # any error of the model's code
        raise NotBuilt(f"its own generate fails: {type(error).__name__}: {error}") from error
