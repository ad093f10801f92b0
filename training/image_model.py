"""The four starter image models, and the training step's fast attention on a CPU."""

from __future__ import annotations

from typing import Any

from image_data import CAPTION_LENGTH
from image_tokenizer import CODES
from torch import Tensor, nn

SHAPES: dict[str, dict[str, int]] = {
    "target": {"hidden_size": 96, "num_hidden_layers": 12, "num_attention_heads": 3},
    "draft": {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 192,
    },
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "emoji": {"condition": "features", "condition_length": CAPTION_LENGTH, "caption_dim": 224},
    "tiles": {"condition": "class", "condition_length": 1, "num_classes": 32},
}
GRID = 8


def build_model(kind: str, name: str, **changes: Any) -> Any:
    """Build the `name` (target or draft) of the set `kind` (emoji or tiles), untrained."""
    from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel

    fields = {"vocab_size": CODES, "grid_size": GRID} | SHAPES[name] | CONDITIONS[kind] | changes
    return LlamaGenModel(LlamaGenConfig(**fields))


def plain_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Attend causally over short whole rows, [B, heads, T, width], as three batched products.

    At 76 positions this is faster than the stock CPU kernel, which works in larger blocks.
    """
    rows, heads, length, width = query.shape
    flat = [part.reshape(rows * heads, length, width) for part in (query, key, value)]
    scores = flat[0] @ flat[1].transpose(1, 2)
    future = scores.new_full((length, length), float("-inf")).triu_(1)
    out = (scores * options["scaling"] + future).softmax(-1) @ flat[2]
    return out.unflatten(0, (rows, heads)).transpose(1, 2).contiguous(), None


def use_plain_attention(model: Any) -> None:
    """Switch a model to `plain_attention` (whole rows only: no padding, no cache)."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("training_rows", plain_attention)
    AttentionMaskInterface.register("training_rows", lambda *args, **options: None)
    model.set_attn_implementation("training_rows")
