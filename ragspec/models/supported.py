"""Which models are outside the project's scope, told by name before any work is done.

What cannot be told from the configuration and the class is left to the load-time probe.
"""

from __future__ import annotations

import inspect
from typing import Any

from ragspec.errors import UnsupportedModelError

# Kinds of layers that carry a state from token to token instead of keys and values, or nothing.
_STATE_LAYERS = {"linear_attention", "mamba", "mamba2", "recurrent", "conv", "hybrid"}
_NO_CACHE_LAYERS = {"moe", "mlp"}
_PURE_RECURRENT = {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm"}
_CAUSAL_WITH_FLAG = {"gpt_neox", "gpt_neox_japanese"}  # is_decoder=False says nothing for these
# Their cache drops what lies before its window while their mask goes on to show it, so that what
# `generate` writes is not what a forward over the whole text says.
_FORGETFUL = {"moshi"}
_ADVICE = "Use a decoder-only model: anything that AutoModelForCausalLM loads and generates with."


def check_config(config: Any) -> None:
    """Refuse what a transformers configuration alone shows to be outside the scope.

    Raises UnsupportedModelError with the name of the architecture, the reason and what to do.
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kind = getattr(config, "model_type", type(config).__name__)
    kinds = {kind, getattr(text, "model_type", kind)}
    if getattr(text, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise _refused(
            kind,
            "it is an encoder-decoder model; expected one stack that reads prompt and answer alike",
        )
    if getattr(text, "is_decoder", None) is False and not kinds & _CAUSAL_WITH_FLAG:
        raise _refused(
            kind,
            "it is an encoder, which sees the text to the right as well (is_decoder=False)",
        )
    if kinds & _FORGETFUL:
        raise _refused(
            kind,
            "its cache forgets what its attention mask still shows, so that its logits depend on "
            "how the text was cut into forwards",
        )
    layers = set(getattr(text, "layer_types", None) or ())
    recurrent = state_layers(config) - {"hybrid"}  # hybrid layers attend as well
    if kinds & _PURE_RECURRENT or (recurrent and layers <= recurrent | _NO_CACHE_LAYERS):
        raise _refused(
            kind,
            "all its layers are recurrent: without any attention layer there is no key-value "
            "cache in which a draft could be verified and rolled back",
        )


def check_scope(model: Any) -> None:
    """Refuse a model object that is outside the scope.

    Raises UnsupportedModelError: not a transformers model, an encoder-decoder, an encoder, a
    model without a language-model head, without attention, or without a key-value cache, or with
    an adapter that adds virtual tokens.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_input_embeddings"):
        raise _refused(type(model).__name__, "it is no transformers model")
    check_config(config)
    name = type(model).__name__
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):
        raise _refused(
            name,
            f"its adapter ({type(adapter).__name__}) puts virtual tokens before the text, which "
            "would stand before every draft again; an adapter that changes weights, such as LoRA, "
            "works",
        )
    if not _has_head(model):
        raise _refused(
            name,
            "it has no head that gives logits over a vocabulary; load the weights with "
            "AutoModelForCausalLM",
        )
    if "past_key_values" not in inspect.signature(unwrapped(model).forward).parameters:
        raise _refused(
            name,
            "its forward takes no past_key_values, so that every token would cost a run over the "
            "whole text",
        )


def state_layers(config: Any) -> set[str]:
    """Return the kinds of layers of a configuration that carry a state from token to token."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return set(getattr(text, "layer_types", None) or ()) & _STATE_LAYERS


def foreign_layers(config: Any) -> set[str]:
    """Return the classes of the layers of a model's own cache that hold more than keys and values.

    Such are the compressed keys of DeepSeek V4, and the index by which sparse attention picks keys.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

    try:
        layers = DynamicCache(config=config).layers
    except Exception:  # whatever a foreign configuration may lack; it says nothing then
        return set()
    plain = (DynamicLayer, DynamicSlidingWindowLayer)
    return {type(layer).__name__ for layer in layers if type(layer) not in plain}


def slot_limit(config: Any) -> int | None:
    """Return the slot from which on a model scales its queries by slots instead of positions.

    None where it never does (all but Llama 4 with its temperature tuning).
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    unturned = not all(getattr(text, "no_rope_layers", None) or [1])
    tuned = getattr(text, "attn_temperature_tuning", False) and unturned
    return int(text.floor_scale) - 1 if tuned else None


def unwrapped(model: Any) -> Any:
    """Return the transformers model inside the wrappers whose forward hides its arguments.

    These are torch.compile's and those of adapters; a model without one is returned as it is.
    """
    model = getattr(model, "_orig_mod", model)
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def rank_count(model: Any) -> int:
    """Return over how many ranks the weights of a model are cut; 1 where they are whole."""
    return int(getattr(unwrapped(model), "tp_size", None) or 1)


def _has_head(model: Any) -> bool:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return head is not None


def _refused(name: str, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{name} cannot be used: {reason}. {_ADVICE}")
