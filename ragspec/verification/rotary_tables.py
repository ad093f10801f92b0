"""Rotary tables that change with the length of the text (longrope).

Such a model rotates keys by one table in texts of up to `original_max_position_embeddings` tokens
and by another in longer ones. transformers picks one table for a whole forward, by its largest
position. So a session takes one row per forward and verifies no draft across the border.

Dynamic scaling changes its table beyond `max_position_embeddings`; longer requests are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

# Their `generate` reads the whole text again, by the long table, at the first token beyond the
# border. (That of Phi 4, and of Phi 3 in early releases, continues from the last token: a bug.)
_READ_AGAIN = {"phi3", "phimoe", "phi4_multimodal"}


def table_border(model: nn.Module) -> int | None:
    """Return the longest text, in tokens, of the short table; None for a model with one table."""
    for module in model.modules():
        if "longrope" in _kinds(module) and hasattr(module, "config"):
            config: Any = module.config
            parameters = config.rope_parameters
            every = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
            borders = [each.get("original_max_position_embeddings") for each in every]
            return next((int(border) for border in borders if border), None)
    return None


def rereads(model: Any) -> bool:
    """Return whether the model's own `generate` reads the text again beyond the border."""
    return model.config.model_type in _READ_AGAIN


def asks_for_length(model: nn.Module, words: Sequence[str] = ("longrope", "dynamic")) -> bool:
    """Return whether a forward reads the length of its text to pick a table, of these kinds."""
    kinds = {kind for module in model.modules() for kind in _kinds(module)}
    return any(word in str(kind) for kind in kinds for word in words)


def continues_rotation(model: nn.Module) -> bool:
    """Return whether positions beyond the model's context are rotated like those within it."""
    rotates = any(kind for module in model.modules() for kind in _kinds(module))
    return rotates and not asks_for_length(model)


def _kinds(module: nn.Module) -> list[Any]:
    kinds = getattr(module, "rope_type", None)
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]
