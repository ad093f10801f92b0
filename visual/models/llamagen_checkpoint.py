"""Loads LlamaGen checkpoints, published or written by its training scripts, as `LlamaGenModel`.

Sizes are read off the weights' shapes. The number of heads and the side of the grid come from the
caller, a rotary table, the training settings or the published sizes. `weights_file` opens the file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError, ModelError
from ragspec.visual.checks import checked_count, side_of
from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel
from ragspec.visual.models.weights_file import PLACES, Tensors, check_finite, read_checkpoint

# Buffers that are not loaded. A model that has generated images has the caches.
_DROPPED = (
    "freqs_cis",
    "quantize.codebook_used",
    "causal_mask",
    "kv_cache.k_cache",
    "kv_cache.v_cache",
)
_HEADS = {768: 12, 1024: 16, 1280: 20, 1536: 24, 2048: 32, 2560: 40, 3200: 32, 4096: 32}
_NAMES = {
    "tok_embeddings.weight": "embed_tokens.weight",
    "cls_embedding.embedding_table.weight": "class_embedding.weight",
    "cls_embedding.cap_proj.fc1.weight": "caption.fc1.weight",
    "cls_embedding.cap_proj.fc2.weight": "caption.fc2.weight",
    "cls_embedding.uncond_embedding": "caption.unconditional",
    "norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attention.wqkv.weight": "attention.qkv_proj.weight",
    "attention.wo.weight": "attention.o_proj.weight",
    "feed_forward.w2.weight": "feed_forward.down_proj.weight",
    "attention_norm.weight": "attention_norm.weight",
    "ffn_norm.weight": "ffn_norm.weight",
}
_GATE, _UP = "feed_forward.w1.weight", "feed_forward.w3.weight"
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")


def load_llamagen(
    path: str | Path,
    *,
    grid_size: int | None = None,
    num_attention_heads: int | None = None,
    dtype: torch.dtype | None = None,
    allow_namespace: bool = False,
) -> LlamaGenModel:
    """Load the model of a published checkpoint file, in eval mode on the CPU.

    Args:
        grid_size: Side of the square of codes (16 for 256 pixels, 24 for 384, 32 for 512).
        num_attention_heads: Required for widths that were not published.
        dtype: None keeps the file's.
        allow_namespace: Also open files of the training scripts, which hold their settings as an
            argparse.Namespace (plain data, no code).

    Raises:
        ModelNotFoundError: There is no such file.
        ModelError: It holds other objects, other weights or weights that are not finite.
        InputError: A size is impossible, or neither passed nor in the file.
    """
    file = Path(path)
    if grid_size is not None:
        grid_size = checked_count(grid_size, "grid_size")
    if num_attention_heads is not None:
        num_attention_heads = checked_count(num_attention_heads, "num_attention_heads")
    published, settings = read_checkpoint(file, allow_namespace)
    weights, dropped = _renamed(published, file)
    config = _config(weights, dropped, settings, grid_size, num_attention_heads)
    kind = weights["lm_head.weight"].dtype if dtype is None else dtype
    weights = {name: value.to(kind) for name, value in weights.items()}
    check_finite(weights, file.name)
    with torch.device("meta"):
        model: LlamaGenModel = LlamaGenModel(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise ModelError(
            f"the weights in {file.name} do not fit together: {error}. Expected those of one "
            "LlamaGen model, all of them."
        ) from error
    model.config.dtype = kind
    return model.eval()  # type: ignore[no-any-return, unused-ignore]


def _renamed(weights: Tensors, file: Path) -> tuple[Tensors, Tensors]:
    """Return the weights by our names, and the dropped buffers by their published names."""
    if "tok_embeddings.weight" not in weights:
        names = ", ".join(sorted(weights)[:3]) or "no tensors"
        raise ModelError(
            f"{file.name} is no LlamaGen generator: it holds {names}; expected "
            f"tok_embeddings.weight under {', '.join(PLACES)} or at the top."
        )
    renamed: Tensors = {}
    dropped = {name: value for name, value in weights.items() if name.endswith(_DROPPED)}
    halves: dict[str, Tensors] = {}
    unknown = []
    for name, value in weights.items():
        layer = _LAYER.fullmatch(name)
        if name in dropped:
            continue
        if name in _NAMES:
            renamed[_NAMES[name]] = value
        elif layer and layer[2] in _LAYER_NAMES:
            renamed[f"layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}"] = value
        elif layer and layer[2] in (_GATE, _UP):
            halves.setdefault(layer[1], {})[layer[2]] = value
        else:
            unknown.append(name)
    numbers = {layer[1] for layer in map(_LAYER.fullmatch, weights) if layer} | {"0"}
    required = [
        f"layers.{i}.{name}" for i in sorted(numbers) for name in (*_LAYER_NAMES, _GATE, _UP)
    ]
    required += ["output.weight", "norm.weight"]
    lacking = [name for name in required if name not in weights]
    if unknown or lacking:
        names = ", ".join((unknown or lacking)[:3])
        raise ModelError(
            f"{file.name} is no LlamaGen generator that can be read here: it "
            f"{'also holds' if unknown else 'lacks'} {names}. Expected the weights of one of the "
            "published class- or text-conditional models."
        )
    _check_shapes({name: value for name, value in weights.items() if name not in dropped}, file)
    for number, pair in halves.items():
        joined = torch.cat([pair[_GATE], pair[_UP]])
        renamed[f"layers.{number}.feed_forward.gate_up_proj.weight"] = joined
    return renamed, dropped


def _check_shapes(weights: Tensors, file: Path) -> None:
    """Raise ModelError unless the weights of norms are vectors and all others are matrices."""
    for name, value in weights.items():
        axes = 1 if name.endswith("norm.weight") else 2
        other = weights.get(name.replace(_GATE, _UP), value)  # of the gate, the other half
        if value.ndim != axes or not value.numel() or other.shape != value.shape:
            expected = list(other.shape) if other.shape != value.shape else f"{axes} axes with rows"
            raise ModelError(
                f"the weights in {file.name} do not fit together: {name} has the shape "
                f"{list(value.shape)}; expected {expected}. Copy the file again."
            )


def _config(
    weights: Tensors, dropped: Tensors, settings: Any, grid_size: int | None, heads: int | None
) -> LlamaGenConfig:
    """Return the configuration of a model, read off its weights where they determine it."""
    book, hidden = weights["embed_tokens.weight"].shape
    layers = 1 + max(int(layer[1]) for layer in map(_LAYER.fullmatch, weights) if layer)
    captions = weights.get("caption.unconditional")
    length = 1 if captions is None else len(captions)
    heads, grid_size = _heads_and_side(dropped, settings, length, hidden, heads, grid_size)
    width, rest = divmod(hidden, heads)
    rows = len(weights["layers.0.attention.qkv_proj.weight"])
    groups = heads if rest else (rows // width - heads) // 2  # LlamaGenConfig refuses a rest
    if not rest and (groups < 1 or heads % groups or (heads + 2 * groups) * width != rows):
        raise ModelError(
            f"the weights do not fit together with {heads} attention heads: wqkv has {rows} rows "
            f"for a width of {hidden}; expected rows for every head, its keys and its values. Pass "
            "num_attention_heads as the model was trained."
        )
    classes = weights.get("class_embedding.weight")
    return LlamaGenConfig(
        vocab_size=book,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        intermediate_size=weights["layers.0.feed_forward.down_proj.weight"].shape[1],
        grid_size=grid_size,
        condition="class" if captions is None else "features",
        num_classes=1000 if classes is None else len(classes) - 1,
        condition_length=length,
        caption_dim=2048 if captions is None else captions.shape[1],
    )


def _heads_and_side(
    dropped: Tensors,
    settings: Any,
    length: int,
    hidden: int,
    heads: int | None,
    grid_size: int | None,
) -> tuple[int, int]:
    """Return the heads and the grid's side: as passed, else by a rotary table or the settings."""
    table = dropped.get("freqs_cis")  # [L + side * side, width / 2, 2]
    if table is not None and table.ndim > 1 and table.numel():
        grid_size = _side(table, length) if grid_size is None else grid_size
        heads = max(1, hidden // (2 * table.shape[1])) if heads is None else heads
    pixels, factor = (getattr(settings, n, None) for n in ("image_size", "downsample_size"))
    if isinstance(pixels, int) and isinstance(factor, int) and 0 < factor <= pixels:
        grid_size = pixels // factor if grid_size is None else grid_size
    heads = _HEADS.get(hidden) if heads is None else heads
    if heads is None:
        raise InputError(
            f"a width of {hidden} is none of the published ones, and weights do not tell their "
            "heads; expected num_attention_heads. Pass it as the model was trained."
        )
    if grid_size is None:
        raise InputError(
            "the checkpoint does not tell the side of its grid of codes; expected grid_size. Pass "
            "16 for pictures of 256 pixels, 24 for 384, 32 for 512."
        )
    return heads, grid_size


def _side(table: Tensor, length: int) -> int:
    """Return the grid's side by the rows of a rotary table; raise ModelError for no square."""
    side = side_of(max(0, len(table) - length))
    if side is None:
        raise ModelError(
            f"the checkpoint's freqs_cis has {len(table)} rows; expected {length} and a square of "
            "codes. Pass grid_size: 16 for pictures of 256 pixels, 24 for 384, 32 for 512."
        )
    return side
