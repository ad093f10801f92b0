"""Checks of models: supported architectures and attention windows."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from ragspec.errors import UnsupportedModelError
from ragspec.types import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True)
class AttentionWindow:
    """The attention range of a kind of layer, within causality.

    Attributes:
        size: Tokens of a sliding window that ends with the query, None for no window.
        chunk: Tokens of a chunk (a query attends only inside its chunk), None for no chunks.
    """

    size: int | None = None
    chunk: int | None = None

    @property
    def plain(self) -> bool:
        """Whether queries attend to all earlier tokens."""
        return self.size is None and self.chunk is None

    def reaches(self, query: Tensor, key: Tensor) -> Tensor:
        """Return whether queries attend to keys, both given by text positions (broadcast)."""
        reached = torch.ones_like(query - key, dtype=torch.bool)
        if self.size is not None:
            reached = reached & (query - key < self.size)
        if self.chunk is not None:
            reached = reached & (query // self.chunk == key // self.chunk)
        return reached


def layer_windows(config: PreTrainedConfig) -> dict[str, AttentionWindow]:
    """Return the window of each kind of layer in a configuration.

    A configuration without kinds of layers has one, called "full_attention" whatever its window.
    """
    text = config.get_text_config()
    unused = getattr(text, "use_sliding_window", True) is False
    size = None if unused else getattr(text, "sliding_window", None) or None
    chunk = getattr(text, "attention_chunk_size", None) or None
    windows = {
        "sliding_attention": AttentionWindow(size=size),
        "chunked_attention": AttentionWindow(chunk=chunk),
    }
    kinds = dict.fromkeys(getattr(text, "layer_types", None) or ())
    layers = {kind: windows.get(kind, AttentionWindow()) for kind in kinds}
    return layers or {"full_attention": AttentionWindow(size=size)}


# Kinds of layers that carry a state from token to token instead of keys and values.
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"}
_NO_CACHE_LAYERS = {"moe", "mlp"}
_PURE_RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
_CAUSAL_WITH_FLAG = {"gpt_neox", "gpt_neox_japanese"}  # is_decoder=False means nothing for these
# Their cache drops keys before its window, but their mask still includes them. So the tokens of
# `generate` differ from those of a forward over the whole text.
_FORGETFUL = {"moshi"}
_ADVICE = "Use a decoder-only model: anything that AutoModelForCausalLM loads and generates with."


def check_config(config: PreTrainedConfig) -> None:
    """Refuse an architecture that its transformers configuration shows to be unsupported.

    Raises:
        UnsupportedModelError: It is an encoder, an encoder-decoder or recurrent throughout, or its
            cache forgets visible keys. The message has the reason and the remedy.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = {getattr(each, "model_type", "") for each in (config, text)}
    layers, reason = set(getattr(text, "layer_types", None) or ()), ""
    recurrent = layers & _STATE_LAYERS - {"hybrid"}  # hybrid layers attend as well
    if any(getattr(each, "is_encoder_decoder", False) for each in (text, config)):
        reason = "it is an encoder-decoder model; expected one stack that reads prompt and answer"
    elif getattr(text, "is_decoder", None) is False and not kinds & _CAUSAL_WITH_FLAG:
        reason = "it is an encoder, which sees the text to the right as well (is_decoder=False)"
    elif kinds & _FORGETFUL:
        reason = (
            "its cache forgets what its attention mask still shows, so that its logits depend on "
            "how the text was cut into forwards"
        )
    elif kinds & _PURE_RECURRENT or (recurrent and layers <= recurrent | _NO_CACHE_LAYERS):
        reason = (
            "all its layers are recurrent: without any attention layer there is no key-value "
            "cache in which a draft could be verified and rolled back"
        )
    if reason:
        raise _refused(getattr(config, "model_type", type(config).__name__), reason)


def check_scope(model: PreTrainedModel) -> None:
    """Refuse an unsupported model object.

    Raises:
        UnsupportedModelError: It is no transformers model, `check_config` refuses it, it lacks a
            language-model head or a KV cache, or its adapter adds virtual tokens.
    """
    config, reason = getattr(model, "config", None), ""
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise _refused(type(model).__name__, "it is no transformers model")
    check_config(config)
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        reason = (
            f"its adapter ({type(adapter).__name__}) puts virtual tokens before the text, which "
            "would stand before every draft again; an adapter that changes weights, such as LoRA, "
            "works"
        )
    elif getattr(model, "get_output_embeddings", lambda: None)() is None:
        reason = "it has no head that gives logits; load its weights with AutoModelForCausalLM"
    elif cache_argument(model) not in inspect.signature(unwrapped(model).forward).parameters:
        reason = "its forward takes no cache of keys: each token would need the whole text again"
    if reason:
        raise _refused(type(model).__name__, reason)


def state_layers(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of layers of a configuration that carry a state from token to token."""
    return set(getattr(config.get_text_config(), "layer_types", None) or ()) & _STATE_LAYERS


def foreign_layers(config: PreTrainedConfig) -> set[str]:
    """Return the classes of cache layers that hold more than keys and values.

    Examples are the compressed keys of DeepSeek V4 and the index of sparse attention.
    """
    from transformers.cache_utils import DynamicCache

    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # the configuration may lack any field: unknown then
        return set()
    plain = {"DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer"}  # the last holds nothing
    return {type(layer).__name__ for layer in layers} - plain


def counts_slots(config: PreTrainedConfig) -> str:
    """Return what a model computes by slot, not position, "" for nothing."""
    text = config.get_text_config()
    without_rope = not all(getattr(text, "no_rope_layers", None) or [1])
    if getattr(text, "attn_temperature_tuning", False) and without_rope:  # Llama 4
        return "queries are scaled"
    if "local" in (getattr(text, "attention_layers", None) or ()):  # GPT-Neo
        return "local layers mask"
    return "ALiBi counts" if getattr(text, "alibi", False) else ""  # Falcon


def unwrapped(model: PreTrainedModel) -> PreTrainedModel:
    """Return the transformers model inside the wrappers of torch.compile and of adapters.

    The signature of a wrapper's forward hides the arguments of the model. A model without a wrapper
    is returned unchanged.
    """
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def cache_argument(model: nn.Module) -> str:
    """Return the name of the cache in a forward's arguments and outputs.

    It is `cache` since transformers 5.24, `past_key_values` before and in older code of models.
    """
    return _cache_argument(type(unwrapped(model)).forward)


@cache
def _cache_argument(forward: Callable[..., object]) -> str:
    accepted = inspect.signature(forward).parameters
    return "cache" if "cache" in accepted else "past_key_values"


def rank_count(model: PreTrainedModel) -> int:
    """Return the number of tensor-parallel ranks of a model; 1 if its weights are whole."""
    return int(getattr(unwrapped(model), "tp_size", None) or 1)


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} cannot be used: {reason}. {_ADVICE}")
