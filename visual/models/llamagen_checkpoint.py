"""Loads LlamaGen checkpoints, published or written by its training scripts, as `LlamaGenModel`.

Sizes are read off the weights' shapes. The number of heads and the side of the grid come from the
caller, a rotary table, the training settings or the published sizes.
"""

from pathlib import Path

import torch
from torch import Tensor

from ragspec.errors import InputError, ModelError
from ragspec.sampling.settings import checked_count
from ragspec.visual.checks import side_of
from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel
from ragspec.visual.models.published import Tensors, WeightLayout, by_patterns, count_blocks

_GATE, _UP = "feed_forward.w1.weight", "feed_forward.w3.weight"


def _with_gates(published: Tensors) -> Tensors:
    """Return the weights with gate and up projection of each layer as one matrix, w13."""
    weights = dict(published)
    for name, gate in published.items():
        up = published.get(name.replace(_GATE, _UP))
        if name.endswith(_GATE) and up is not None and up.shape == gate.shape:
            weights[name.replace("w1", "w13")] = torch.cat([gate, up])
            del weights[name], weights[name.replace(_GATE, _UP)]
    return weights


_LAYOUT = WeightLayout(
    "LlamaGen generator",
    {
        "embed_tokens.weight": 2,
        "lm_head.weight": 2,
        "layers.0.attention.qkv_proj.weight": 2,
        "layers.0.feed_forward.down_proj.weight": 2,
    },
    by_patterns(
        (r"^tok_embeddings\.", "embed_tokens."),
        (r"^cls_embedding\.embedding_table\.", "class_embedding."),
        (r"^cls_embedding\.cap_proj\.", "caption."),
        (r"^cls_embedding\.uncond_embedding$", "caption.unconditional"),
        (r"^output\.", "lm_head."),
        (r"\.attention\.wqkv\.", ".attention.qkv_proj."),
        (r"\.attention\.wo\.", ".attention.o_proj."),
        (r"\.feed_forward\.w2\.", ".feed_forward.down_proj."),
        (r"\.feed_forward\.w13\.", ".feed_forward.gate_up_proj."),
    ),
    # Buffers. A model that has generated images has the caches.
    dropped=r"(?:freqs_cis|codebook_used|causal_mask|kv_cache\.[kv]_cache)$",
    heads={768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32},
    prepare=_with_gates,
)


def load_llamagen(
    path: str | Path,
    *,
    grid_size: int | None = None,
    num_attention_heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> LlamaGenModel:
    """Load the model of a published checkpoint file, in eval mode on the CPU.

    Args:
        grid_size: Side of the square of codes (16 for 256 pixels, 24 for 384, 32 for 512).
        num_attention_heads: Required for widths that were not published.
        dtype: None keeps the file's.

    Raises:
        MissingModelError: There is no such file.
        ModelError: It holds other objects, other weights or weights that are not finite.
        InputError: A size is impossible, or neither passed nor in the file.
    """

    def build(weights: Tensors, published: Tensors, settings: object) -> LlamaGenModel:
        table = published.get("freqs_cis")
        return LlamaGenModel(_config(weights, table, settings, grid_size, num_attention_heads))

    model = _LAYOUT.load(path, build, dtype)
    model.config.dtype = model.dtype
    return model


def _config(
    weights: Tensors, table: Tensor | None, settings: object, side: int | None, heads: int | None
) -> LlamaGenConfig:
    """Return the configuration of a model, read off its weights where they determine it.

    Args:
        table: The rotary table [L + side * side, width / 2, 2] of the file, if any.
    """
    book, hidden = weights["embed_tokens.weight"].shape
    captions = weights.get("caption.unconditional")
    captions = captions if captions is not None and captions.ndim == 2 else None
    length = 1 if captions is None else len(captions)
    if table is not None and (table.ndim < 2 or not table.numel()):
        table = None
    if side is None:
        side = _side(table, settings, length)
    if heads is None and table is not None:
        heads = max(1, hidden // (2 * table.shape[1]))
    heads = _LAYOUT.checked_heads(heads, hidden)
    rows = len(weights["layers.0.attention.qkv_proj.weight"])
    classes = weights.get("class_embedding.weight")
    return LlamaGenConfig(
        vocab_size=book,
        hidden_size=hidden,
        num_hidden_layers=count_blocks(weights, "layers"),
        num_attention_heads=heads,
        num_key_value_heads=max(1, (rows // max(1, hidden // heads) - heads) // 2),
        intermediate_size=weights["layers.0.feed_forward.down_proj.weight"].shape[1],
        grid_size=checked_count(side, "grid_size"),
        condition="class" if captions is None else "features",
        num_classes=1000 if classes is None else classes.numel() // hidden - 1,
        condition_length=length,
        caption_dim=2048 if captions is None else captions.shape[1],
    )


def _side(table: Tensor | None, settings: object, length: int) -> int:
    """Return the grid's side by a rotary table behind a condition of a length, or the settings."""
    if table is not None:
        if (side := side_of(max(0, len(table) - length))) is None:
            raise ModelError(
                f"the checkpoint's freqs_cis has {len(table)} rows; expected {length} and a square "
                "of codes. Pass grid_size: 16 for pictures of 256 pixels, 24 for 384, 32 for 512."
            )
        return side
    pixels, factor = (getattr(settings, n, None) for n in ("image_size", "downsample_size"))
    if isinstance(pixels, int) and isinstance(factor, int) and 0 < factor <= pixels:
        return pixels // factor
    raise InputError(
        "the checkpoint does not tell the side of its grid of codes; expected grid_size. Pass "
        "16 for pictures of 256 pixels, 24 for 384, 32 for 512."
    )
