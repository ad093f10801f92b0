"""The cost of drawing at LlamaGen's published sizes with random weights; the pictures mean nothing.

    OMP_NUM_THREADS=1 python benchmarks/image_sizes.py --size B --draw --json b.json
    OMP_NUM_THREADS=1 python benchmarks/image_sizes.py --size XL --dtype bfloat16 --json xl.json

The script measures bytes of the table of neighbours over 16,384 codes, and seconds of a forward
over one position and over a tree. With --draw it draws a whole picture, plain and speculative,
whose codes must be equal. Random weights give random distributions, so codes a forward mean
nothing.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
import tracemalloc
from pathlib import Path
from typing import Any

import torch

from ragspec.models.device import pick_device, pick_dtype
from ragspec.visual.models.llamagen import LlamaGenConfig, LlamaGenModel
from ragspec.visual.models.target import ConditionTable, ImageTarget
from ragspec.visual.models.vq import VQTokenizer
from ragspec.visual.pipeline import ImagePipeline
from ragspec.visual.rules.by_name import default_settings
from ragspec.visual.rules.codebook import CodeNeighbours

LABEL = "random weights"
SIZES = {  # arXiv 2406.06525, table 1: layers, width, heads
    "B": (12, 768, 12),
    "L": (24, 1024, 16),
    "XL": (36, 1280, 20),
    "small": (2, 64, 2),
}
NODES = (0, 4, 12, 32, 64)
CODES, LATENT = 16_384, 8
SPREAD = 0.3  # deviation of the head's weights, so that neighbours matter to distributions
MEGABYTE = 1e6


def config_of(size: str, layers: int | None = None) -> LlamaGenConfig:
    """Return the class-conditional configuration of a size, for 256 pixels."""
    depth, width, heads = SIZES[size]
    small = size == "small"
    return LlamaGenConfig(
        vocab_size=256 if small else CODES,
        hidden_size=width,
        num_hidden_layers=layers or depth,
        num_attention_heads=heads,
        grid_size=4 if small else 16,
        num_classes=10 if small else 1000,
    )


def make_model(config: LlamaGenConfig, dtype: torch.dtype, device: torch.device) -> Any:
    """Return a model with random weights in this dtype on the device."""
    with torch.device("meta"):
        model = LlamaGenModel(config)
    model = model.to(dtype).to_empty(device=device).eval()
    torch.manual_seed(0)
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.fill_(1.0)
        else:
            weight.data.normal_(0.0, SPREAD if name.startswith("lm_head") else 0.02)
    model.config.dtype = dtype
    return model


def make_tokenizer(config: LlamaGenConfig) -> VQTokenizer:
    """Return a tokenizer with a random code-book and a toy decoder."""
    from diffusers import VQModel

    torch.manual_seed(1)
    vq = VQModel(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=LATENT,
        vq_embed_dim=LATENT,
        num_vq_embeddings=config.vocab_size,
        norm_num_groups=4,
        sample_size=2 * config.grid_size,
    )
    return VQTokenizer(vq)


def table_figures(codebook: torch.Tensor, k: int) -> dict[str, Any]:
    """Return bytes, peak memory and seconds of building a table of k neighbours."""
    tracemalloc.start()
    began = time.process_time()
    table = CodeNeighbours.build(codebook, k)
    seconds, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {
        "codes": len(codebook),
        "k": k,
        "table_MB": table.rows.nbytes / MEGABYTE,
        "peak_MB": peak / MEGABYTE,
        "all_pairs_MB": 8 * len(codebook) ** 2 / MEGABYTE,
        "cpu_seconds": seconds,
    }


def forward_figures(model: Any, repeats: int) -> list[dict[str, float]]:
    """Return the least seconds of a guided forward over a root and drafted codes."""
    labels = torch.tensor([0])
    with torch.no_grad():
        table = ConditionTable(model.condition(labels), model.unconditional(1)[0])
    target = ImageTarget(model, table, 2.0)
    length = int(model.config.grid_size**2) // 2
    rows = []
    for nodes in [n for n in NODES if length + n < target.max_length]:
        seconds = min(target.time_forward(nodes + 1, length) for _ in range(repeats))
        rows.append({"drafted": nodes, "seconds": seconds})
    return rows


def draw_figures(model: Any, tokenizer: VQTokenizer, k: int) -> list[dict[str, Any]]:
    """Return a row for every variant of one picture; exact ones must equal the plain one."""
    draft = make_model(config_like(model.config, 1), model.dtype, model.device)
    relaxed = {"neighbours": k, "delta": 0.1}
    variants: dict[str, tuple[Any, str, dict[str, Any]]] = {
        "plain": (None, "exact", {}),
        "exact, target's forward in branches": ("jacobi", "exact", {}),
        "exact, tree of a one-layer draft": (draft, "exact", {"min_expected_gain": 0.0}),
        "lantern, target's forward": ("jacobi", "lantern", relaxed),
    }
    plain, rows = None, []
    for name, (drafter, rule, settings) in variants.items():
        pipe = ImagePipeline(model, tokenizer, drafter, rule, **settings)
        pipe.set_progress_bar_config(disable=True)
        out = pipe(class_labels=0, seed=0, output_type="latent")
        plain = out.codes if plain is None else plain
        rows.append(
            {
                "variant": name,
                "label": out.label,
                "forwards": out.stats.forwards,
                "equal_to_plain": float((out.codes == plain).float().mean()),
                "seconds": out.stats.seconds,
            }
        )
    return rows


def config_like(config: LlamaGenConfig, layers: int) -> LlamaGenConfig:
    """Return the configuration with fewer layers."""
    return LlamaGenConfig(**{**config.to_dict(), "num_hidden_layers": layers})


def lantern_k(model: Any) -> int:
    """Return LANTERN's k for a model's codes: 1,000 of 16,384 as published."""
    codes = int(model.config.vocab_size)
    return 1000 if codes == CODES else int(default_settings("lantern", codes)["neighbours"])


def main() -> None:
    """Run the measurements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=sorted(SIZES), default="B")
    parser.add_argument("--small", action="store_true", help="use a toy size to test the script")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--draw", action="store_true", help="also draw a whole picture in four variants"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = "small" if options.small else options.size
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype, device)
    assert isinstance(dtype, torch.dtype), "expected a dtype, not auto"
    model = make_model(config_of(size), dtype, device)
    tokenizer = make_tokenizer(model.config)
    figures: dict[str, Any] = {
        "label": LABEL,
        "size": size,
        "dtype": str(dtype),
        "device": str(device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "table": table_figures(tokenizer.codebook(), lantern_k(model)),
        "forwards": forward_figures(model, options.repeats),
        "pictures": draw_figures(model, tokenizer, lantern_k(model)) if options.draw else [],
        "highest_resident_MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000,
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
