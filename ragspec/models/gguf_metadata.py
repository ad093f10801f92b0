"""What a GGUF file says of shape, positions, tokenizer and ends, and transformers does not read."""

import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ragspec.errors import UnsupportedModelError
from ragspec.types import PreTrainedConfig, PreTrainedModel, Tokenizer

ATTENTION = "scaling.attn_factor", "scaling.yarn_attn_factor", "scaling.yarn_ext_factor"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
BIASES = {
    "attention_bias": "attn_q attn_k attn_v attn_output",
    "mlp_bias": "ffn_gate ffn_up ffn_down",
}
BY_HIDDEN_SIZE = ("gemma2", 46), ("gemma3_text", 62)  # the others scale by the size of a head
FREQUENCIES = "rope_freqs.weight"
NO_WEIGHT = re.compile(r"rope_|v\.|mm\.|.*rot_embd")  # of positions or pictures
# What cuts a text into words, by its name in llama.cpp.
GPT2 = "", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"
DIGITS = "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"
WITH_BEGIN = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"})
WITH_BEGIN |= {"midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
ENDS |= {"<|endoftext|>", "<|end_of_text|>"}
_QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CODER = r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
PATTERNS = MappingProxyType({"stablelm2": (_QWEN2,), "bloom": (_BLOOM,), "deepseek-coder": _CODER})


def read_metadata(file: Path) -> tuple[dict[str, Any], set[str]]:
    """Return values by name without the first part, lengths for texts, and names of tensors."""
    from transformers.integrations.gguf import read_gguf_metadata

    values, tensors = read_gguf_metadata(str(file))
    return {name.partition(".")[2]: value for name, value in values.items()}, {*tensors}


def refusal(file: Path, what: str) -> UnsupportedModelError:
    """Return the error for a part of a GGUF file without which the model writes another text."""
    return UnsupportedModelError(
        f"{file} has {what}, which is not read from GGUF. Name the folder of the model in place of "
        "the file."
    )


def complete_config(config: PreTrainedConfig, file: Path) -> None:
    """Set what a GGUF file says of shape and positions and transformers does not read.

    Raises:
        UnsupportedModelError: It scales positions in a way that is not read.
    """
    (values, tensors), kind = read_metadata(file), config.model_type
    for flag, layers in BIASES.items():
        if flag in vars(config) and tensors >= {f"blk.0.{layer}.bias" for layer in layers.split()}:
            setattr(config, flag, True)
    if kind == "phi3":
        config.sliding_window = values.get("attention.sliding_window") or None
    if (kind, getattr(config, "num_hidden_layers", 0)) in BY_HIDDEN_SIZE:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    rope = getattr(config, "rope_parameters", {})  # GPT-2 and BLOOM have none
    if rope.get("rope_type") == "default":
        if "head_dim" in vars(config):
            config.head_dim = values.get("attention.key_length", config.head_dim)
        rope["rope_theta"] = values.get("rope.freq_base", rope["rope_theta"])
        width = getattr(config, "head_dim", 0) or config.hidden_size // config.num_attention_heads
        share = values.get("rope.dimension_count", width) / width
        if share != rope.get("partial_rotary_factor", 1.0):
            rope["partial_rotary_factor"] = share
    _set_scaling(config, file)


def _set_scaling(config: PreTrainedConfig, file: Path) -> None:
    """Set how a GGUF file scales positions; Llama 3's divisors must be those of its scaling."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    values, names = read_metadata(file)
    values = {name.removeprefix("rope."): value for name, value in values.items()}
    unread = {name for name in names if name.startswith("rope_")} - {FREQUENCIES}
    unread |= {name for name in ATTENTION if values.get(name, 1.0) not in (-1.0, 1.0)}
    factor = values.get("scaling.factor") or values.get("scale_linear") or 1.0
    kind = values.get("scaling.type", "linear" if factor != 1.0 else "none")
    rope = getattr(config, "rope_parameters", {})  # GPT-2 and BLOOM have none
    rope = rope.get("full_attention", rope)
    if FREQUENCIES in names and rope.get("rope_type") == "default":
        from gguf import GGUFReader

        (data,) = (each.data for each in GGUFReader(file).tensors if each.name == FREQUENCIES)
        if (divisors := torch.tensor(data)).max() > 1.0:
            kind = "llama3"
            rope.update({**LLAMA3, "factor": float(divisors.max()), "rope_type": kind})
            frequencies, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
            plain = rope["rope_theta"] ** -torch.linspace(0, 1, len(frequencies) + 1)[:-1]
            if not torch.allclose(plain / frequencies, divisors, 0.01):
                unread.add(FREQUENCIES)
    if unread or kind not in ("none", "linear", "yarn", "llama3"):
        got = ", ".join(sorted(unread)) or f"the scaling {kind!r}"
        raise refusal(file, f"{got} for its positions")
    if kind in ("linear", "yarn"):
        rope.update({"rope_type": kind, "factor": factor})
    if kind == "yarn":
        original = values.get("scaling.original_context_length") or config.max_position_embeddings
        betas = {name: values.get(f"scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        rope.update({"original_max_position_embeddings": original, **betas})


def complete_model(model: PreTrainedModel, tokenizer: Tokenizer, file: Path) -> None:
    """Set the ends of texts; raise UnsupportedModelError if transformers left weights out."""
    from transformers import modeling_gguf_pytorch_utils as gguf
    from transformers.integrations.gguf import is_gguf_arch_supported

    values, tensors = read_metadata(file)
    kind = gguf.TENSOR_PROCESSORS.get(values["architecture"], gguf.TensorProcessor)
    if not is_gguf_arch_supported(values["architecture"]):  # those of others are reported
        read = gguf.get_gguf_hf_weights_map(model, kind(config=model.config.to_dict()))
        unread = [each for each in sorted(tensors - read.keys()) if not NO_WEIGHT.match(each)]
        if unread:
            raise refusal(file, f"{len(unread)} weights, such as {unread[0]}")
    config, backend = model.generation_config, tokenizer.backend_tokenizer
    known = config.eos_token_id
    stated = {values.get(f"ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")}
    special = {each.content for each in backend.get_added_tokens_decoder().values() if each.special}
    parts = {"<|end|>"} if "<|return|>" in special else set()  # it ends a part of an answer there
    named = {backend.model.token_to_id(name) for name in special.intersection(ENDS) - parts}
    ends = {*stated, *named, *(known if isinstance(known, list) else [known])} - {None}
    config.eos_token_id = sorted(ends) or None


def complete_tokenizer(tokenizer: Tokenizer, file: Path) -> None:
    """Let a tokenizer cut text into words and begin it as its GGUF file says.

    Raises:
        UnsupportedModelError: The file names an unknown kind.
    """
    from tokenizers import decoders
    from tokenizers.pre_tokenizers import ByteLevel, Metaspace

    (values, _), backend = read_metadata(file), tokenizer.backend_tokenizer
    kind = values.get("ggml.pre", "")
    if isinstance(backend.pre_tokenizer, ByteLevel):  # transformers does not know the kind
        if (cut := splitter(kind)) is None:
            raise refusal(file, f"a tokenizer of the kind {kind!r}")
        backend.pre_tokenizer = cut
    if kind in WITH_BEGIN:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = values.get("ggml.add_bos_token", tokenizer.bos_token is not None)
    if isinstance(backend.pre_tokenizer, Metaspace) and not values.get("ggml.add_space_prefix", 1):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        backend.decoder = decoders.Sequence([*parts])  # which strip no space


def splitter(kind: str) -> object:
    """Return what cuts a text into words for a kind of tokenizer; None if it is unknown."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split

    words = ByteLevel(add_prefix_space=False)
    if kind == "falcon":
        threes = Split(Regex("[0-9][0-9][0-9]"), "isolated")
        return Sequence([Punctuation("contiguous"), words, Digits(), threes])
    if kind in PATTERNS:
        cuts = [Split(Regex(each), "isolated") for each in PATTERNS[kind]]
        return Sequence([*cuts, ByteLevel(add_prefix_space=False, use_regex=False)])
    if kind in DIGITS:
        return Sequence([Digits(individual_digits=True), words])
    return words if kind in GPT2 else None
