"""What a GGUF file says of shape, positions, tokenizer and ends, and transformers does not read."""

import re
from pathlib import Path
from typing import Any

from ragspec.errors import UnsupportedModelError
from ragspec.types import PreTrainedConfig, PreTrainedModel, Tokenizer

ATTENTION = "scaling.attn_factor", "scaling.yarn_attn_factor", "scaling.yarn_ext_factor"
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
JOIN = "Join the parts of a split GGUF file with `llama-gguf-split --merge`"
BIASES = {
    "attention_bias": "attn_q attn_k attn_v attn_output",
    "mlp_bias": "ffn_gate ffn_up ffn_down",
}
BY_HIDDEN_SIZE = ("gemma2", 46), ("gemma3_text", 62)  # the others scale by the size of a head
FREQUENCIES = "rope_freqs.weight"
NO_WEIGHT = re.compile(r"rope_|v\.|mm\.|.*rot_embd")  # of positions or pictures
# What cuts a text into words, by its name in llama.cpp: kinds of other names, those that cut as
# GPT-2 does, and those that also cut between digits.
SAME = {"stablelm2": "qwen2", "hunyuan": "qwen2", "glm4": "llama3", "chatglm-bpe": "llama3"}
SAME |= {"poro-chat": "bloom", "gpt3-finnish": "bloom", "hunyuan-dense": "deepseek-v3"}
SAME |= {"mellum": "gpt-2", "a.x-4.0": "gpt-2", "falcon": "gpt-2"}  # and cuts further
GPT2 = "", "default", "gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "gigachat", "exaone4"
DIGITS = "smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"
WITH_BEGIN = frozenset({"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"})
WITH_BEGIN |= {"midm-2.0", "lfm2", "jina-v5-nano", "tekken"}
ENDS = frozenset({"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"})
ENDS |= {"<|endoftext|>", "<|end_of_text|>"}
_DIGIT, _HAN, _BLOOM = r"\p{N}", r"[ࠀ-龥가-퟿]+", r" ?[^(\s|.,!?…。，、।۔،)]+"
# DeepSeek's first letters have case; newer ones and those of formulas are absent.
_NEWER = r"\u0560-\u0588\u10c6-\u10ff\u1c80-\u1c8a\u2d00-\u2d2d\ua790-\ua7fa\uab30-\uab68"
_NEWER += r"\x{10500}-\x{106ff}\x{10d00}-\x{117ff}\x{16e40}-\x{16e7f}\x{1d400}-\x{1dfff}"
_CASED = rf"\s?[[\p{{Lu}}\p{{Ll}}\p{{Lt}}]&&[^{_NEWER}]]+"
_V3 = (
    r"[\x21-\x2f\x3a-\x40\x5b-\x60\x7b-\x7e][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    **dict.fromkeys(GPT2, ()),
    **dict.fromkeys(DIGITS, (_DIGIT,)),
    "bloom": (_BLOOM,),
    "viking": (_BLOOM, _DIGIT),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN, _DIGIT),
    "deepseek-llm": (r"[\r\n]", _CASED, r"\s?[!-/:-~！-／：-～‘-‟　-。]+", r"\s+$", _HAN, _DIGIT),
    "deepseek-v3": (r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+", _V3),
}


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


def complete_config(config: PreTrainedConfig, file: Path) -> PreTrainedConfig:
    """Return a configuration with what a GGUF file says and transformers does not read.

    A Mistral becomes the Llama that llama.cpp runs; transformers finds no weights of a Mistral.

    Raises:
        UnsupportedModelError: It is a part of a model, or its positions are scaled in a way that
            is not read.
    """
    from transformers import LlamaConfig

    (values, tensors), kind = read_metadata(file), config.model_type
    if values.get("count", 1) > 1:  # `split.count`
        raise UnsupportedModelError(f"{file.name} is a part of a model. {JOIN}.")
    if kind == "mistral":
        changes = {"model_type": "llama", "sliding_window": None}
        config = LlamaConfig.from_dict(config.to_dict() | changes)
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
    return config


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
    from tokenizers import Regex, decoders
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Metaspace, Punctuation, Sequence, Split
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    (values, _), backend = read_metadata(file), tokenizer.backend_tokenizer
    kind = values.get("ggml.pre", "")
    if isinstance(backend.pre_tokenizer, ByteLevel):  # transformers does not know the kind
        known = {name: (each,) for name, each in GGUF_PRE_TOKENIZER_SPLITS.items()} | PATTERNS
        if (patterns := known.get(SAME.get(kind, kind))) is None:
            raise refusal(file, f"a tokenizer of the kind {kind!r}")
        words = patterns in ((), (_DIGIT,))  # those of GPT-2
        cuts: list[Any] = [Split(Regex(each), "isolated") for each in patterns]
        cuts.append(ByteLevel(add_prefix_space=False, use_regex=words))
        if kind == "falcon":
            threes = Split(Regex("[0-9][0-9][0-9]"), "isolated")
            cuts = [Punctuation("contiguous"), *cuts, Digits(), threes]
        backend.pre_tokenizer = Sequence(cuts)
    if kind in WITH_BEGIN:
        backend.model.ignore_merges = True
        tokenizer.add_bos_token = values.get("ggml.add_bos_token", tokenizer.bos_token is not None)
    if isinstance(backend.pre_tokenizer, Metaspace) and not values.get("ggml.add_space_prefix", 1):
        backend.pre_tokenizer = Metaspace(prepend_scheme="never", split=False)
        parts = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()
        backend.decoder = decoders.Sequence([*parts])  # which strip no space
