"""What drawing with the model of a folder takes, told before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ragspec.engine.rows import MOST_NODES
from ragspec.models.memory import Memory, weight_bytes
from ragspec.target.kv_cache import slot_bytes
from ragspec.visual.acceptance.by_name import table_bytes
from ragspec.visual.models.llamagen import LlamaGenConfig
from ragspec.visual.pipeline.folder import ImageFolder

GUIDED = 2  # rows of a picture's cache, see `ImageTarget`
_SHAPE = (  # what keys and values are counted by
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "grid_size",
    "condition",
    "condition_length",
)
ADVICE = "draw fewer side by side (batch_size=), or in smaller numbers (dtype=torch.bfloat16)."


def drawing_memory(
    folder: ImageFolder,
    dtype: torch.dtype | str = "auto",
    *,
    drafter: Any = None,
    rule: Any = "exact",
    batch_size: int = 16,
    neighbours: Any = None,
) -> Memory:
    """Return the bytes that guided drawing takes, batch_size pictures side by side.

    Weights of target, tokenizer and, where it drafts, the draft model; keys and values of the
    pictures; the table of neighbours that the rule reads, while it is built. Packed copies of
    weights, which a CPU makes where they fit well, are not counted. What cannot be read counts
    nothing: loading tells of it.
    """
    spare = 1 if drafter is None else MOST_NODES
    rows = batch_size if isinstance(batch_size, int) else 0
    parts = {"weights": weight_bytes(folder.target, dtype)}
    parts["cache"] = _cache_bytes(folder.target, dtype, rows, spare)
    if folder.draft is not None and _drafts(drafter):
        parts["weights of the draft model"] = weight_bytes(folder.draft, dtype)
        parts["its cache"] = _cache_bytes(folder.draft, dtype, rows, spare)
    if folder.tokenizer is not None:
        parts["tokenizer"] = weight_bytes(folder.tokenizer, torch.float32)
    codes = _config(folder.target).get("vocab_size")
    if isinstance(rule, str) and isinstance(codes, int):
        parts["table of neighbours"] = table_bytes(rule, codes, neighbours)
    return Memory({name: size for name, size in parts.items() if size})


def _drafts(drafter: Any) -> bool:
    """Whether a draft model that lies with the target is among what drafts."""
    words = drafter if isinstance(drafter, Sequence) and not isinstance(drafter, str) else [drafter]
    return any(isinstance(word, str) and word in ("model", "starter") for word in words)


def _cache_bytes(folder: Path, dtype: torch.dtype | str, rows: int, spare: int) -> int:
    """Return the bytes of keys and values of so many pictures, with spare slots for drafts."""
    told = _config(folder)
    fields = {**told, **told.get("trunk", {})} if isinstance(told.get("trunk"), dict) else told
    try:
        config = LlamaGenConfig(**{name: fields[name] for name in _SHAPE if name in fields})
        slots = config.condition_length + config.grid_size**2 + spare
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, told.get("dtype", ""))
        return GUIDED * rows * slots * slot_bytes(config, kind)
    except (TypeError, ValueError, AttributeError):
        return 0


def _config(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
