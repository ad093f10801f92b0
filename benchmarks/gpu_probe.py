"""What verifying a tree costs on an accelerator: a random-weight Llama of 8 B as a pure cost probe.

    python benchmarks/gpu_probe.py --json gpu.json

Weights are made on the device; nothing is downloaded and nothing the model says means anything.
Each forward is set against the time in which its bytes can be read at the measured bandwidth.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ragspec.models.device import pick_device
from ragspec.target.causal import CausalTarget

NODES = (0, 8, 16, 32, 64)
LENGTHS = (512, 4096)
LARGE = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
SMALL = {**LARGE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}


def make_model(sizes: dict[str, int], device: torch.device) -> Any:
    """Return a bf16 Llama whose random weights were drawn on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).bfloat16()
    model = model.to_empty(device=device).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.02)
    # Buffers were never computed on the meta device: the rotary module is made again.
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(device)
    return model


def bandwidth(target: CausalTarget, gigabytes: float = 2.0) -> float:
    """Return bytes per second of a large device-to-device copy, reads plus writes."""
    size = int(gigabytes * 1e9) if target.device.type != "cpu" else 64_000_000
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=target.device)
    sink = torch.empty_like(source)
    taken = []
    for _ in range(12):
        target.synchronize()
        began = time.perf_counter()
        sink.copy_(source)
        target.synchronize()
        taken.append(time.perf_counter() - began)
    return 2 * size / median(taken[2:])


def measure(target: CausalTarget, repeats: int) -> list[dict[str, float]]:
    """Return a row for each context length and tree size."""
    speed = bandwidth(target)
    weights = sum(p.numel() * p.element_size() for p in target.model.parameters())
    embedding = target.model.get_input_embeddings().weight
    read = weights - embedding.numel() * embedding.element_size()
    config = target.model.config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads
    per_token = 2 * 2 * width * config.num_hidden_layers
    rows = []
    for length in LENGTHS:
        for nodes in NODES:
            taken = [target.time_forward(nodes + 1, length) for _ in range(repeats + 2)][2:]
            floor = (read + per_token * length) / speed
            rows.append(
                {
                    "length": length,
                    "nodes": nodes,
                    "ms": 1000 * median(taken),
                    "floor_ms": 1000 * floor,
                    "over_floor": median(taken) / floor,
                }
            )
    return rows


def main() -> None:
    """Run the probe and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a toy size, to try the script")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    target = CausalTarget(
        make_model(SMALL if options.small else LARGE, pick_device(options.device))
    )
    rows = measure(target, options.repeats)
    for row in rows:
        print("  ".join(f"{name} {value:.4g}" for name, value in row.items()))
    if options.json:
        options.json.write_text(json.dumps({"device": str(target.device), "rows": rows}))


if __name__ == "__main__":
    main()
