"""A toy GGUF file: the tiny Llama with a byte-level tokenizer, in the layout of real files."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType
from gguf.quants import quantize

from tests.support import tiny

LETTERS = [chr(code) for code in range(33, 126)]
TOKENS = [*LETTERS, "Ġ", "ab", "<|im_end|>", "<eos>"]  # the space as GPT-2 writes it
NORMAL, CONTROL = 1, 3  # kinds of tokens
TENSORS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
IN_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    rope: dict[str, Any] | None = None,
    pre: str = "smollm",
    also: Callable[[GGUFWriter], object] = lambda writer: None,
) -> Any:
    """Write the file and return the model that it holds, with other rotary positions if given."""
    model = tiny.model("llama")
    if rope is not None:
        (config := copy.deepcopy(model.config)).rope_parameters = rope
        weights, model = model.state_dict(), type(model)(config).eval()
        model.load_state_dict(weights)
    writer = GGUFWriter(str(path), architecture)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(TOKENS)
    writer.add_token_types([NORMAL] * (len(TOKENS) - 2) + [CONTROL] * 2)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(model.config.vocab_size - 1)
    writer.add_eos_token_id(model.config.vocab_size - 1)
    also(writer)
    add_llama(writer, model)
    return model


def add_llama(
    writer: GGUFWriter, model: Any, stored_as: GGMLQuantizationType | None = None
) -> None:
    """Write a Llama, its matrices in blocks of a type or as they are, and close the file."""
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    add_rope(writer, config.rope_parameters, model.model.rotary_emb.inv_freq)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    for name, weight in model.state_dict().items():
        array = weight.numpy()
        for kind, heads in (("q", config.num_attention_heads), ("k", config.num_key_value_heads)):
            if f"{kind}_proj" in name:
                array = _interleaved(array, heads)
        array, blocks = np.ascontiguousarray(array), None if array.ndim == 1 else stored_as
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        writer.add_tensor(
            _name(name), array if blocks is None else quantize(array, blocks), raw_dtype=blocks
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_rope(writer: GGUFWriter, rope: dict[str, Any], frequencies: Any) -> None:
    """Write the base and scaling of rotary positions."""
    writer.add_rope_freq_base(float(rope["rope_theta"]))
    if rope["rope_type"] == "llama3":
        plain = rope["rope_theta"] ** -np.linspace(0, 1, len(frequencies) + 1)[:-1]
        writer.add_tensor("rope_freqs.weight", (plain / frequencies.numpy()).astype(np.float32))
    elif rope["rope_type"] != "default":
        writer.add_float32(f"llama.rope.{rope.get('key', 'scaling.factor')}", rope["factor"])
        if "original_max_position_embeddings" in rope:  # else as older files are
            writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"] % 512)
        if "beta_fast" in rope:
            writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_attn_factors(rope.get("attention_factor", 1.0))


def _name(name: str) -> str:
    if name in TENSORS:
        return TENSORS[name]
    _, _, layer, *inner = name.split(".")
    return f"blk.{layer}.{IN_BLOCK['.'.join(inner[:-1])]}.weight"


def _interleaved(weight: Any, heads: int) -> Any:
    """Return a projection with the halves of each head's rotary pairs side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, -1)
