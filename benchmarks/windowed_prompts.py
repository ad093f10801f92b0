"""Memory and time of the prefill of long prompts with sliding windows, on the CPU.

    OMP_NUM_THREADS=1 python benchmarks/windowed_prompts.py --tokens 8192,32768 --json FILE

The model has random weights in the shape of Gemma 3, with sliding windows in five of six layers.
Every prefill runs in a separate process. Its peak of resident memory grows by the KV cache,
activations and masks. `--against DIR` also runs each prefill with another checkout, interleaved.
Ratios are to that checkout, of processor time, which other work disturbs least.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
}


def read_once(options: argparse.Namespace) -> dict[str, float]:
    """Return the seconds and memory of one prefill in this process."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from ragspec.engine.engine import Engine
    from ragspec.verification.causal import CausalTarget

    torch.manual_seed(0)
    n = options.one
    config = Gemma3TextConfig(
        **SIZES, sliding_window=options.window, max_position_embeddings=n + 64
    )
    target = CausalTarget(Gemma3ForCausalLM(config).to(getattr(torch, options.dtype)).eval())
    target.piece = options.piece or None
    tokens = torch.randint(SIZES["vocab_size"], (n,)).tolist()
    engine = Engine(target, None, None)
    options_of_call: Any = {"max_new_tokens": 1, "logprobs": 0}
    engine.generate(tokens[:32], **options_of_call)  # excludes one-time allocations
    before, began = peak(), time.process_time()
    generation = engine.generate(tokens, **options_of_call)
    seconds, grown = time.process_time() - began, peak() - before
    layer_bytes = 2 * SIZES["num_key_value_heads"] * SIZES["head_dim"] * target.dtype.itemsize
    return {
        "seconds": seconds,
        "grown_MB": grown,
        "cache_MB": layer_bytes * SIZES["num_hidden_layers"] * n / 1e6,
        "checksum": generation.tokens[0] + generation.logprobs[0].logprob,
    }


def peak() -> float:
    """Return the most resident memory so far, in MB."""
    unit = 1e6 if sys.platform == "darwin" else 1e3
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def run(folder: Path, tokens: int, piece: int, options: argparse.Namespace) -> dict[str, float]:
    """Return `read_once` of a subprocess that imports the library from `folder`."""
    inputs = {"one": tokens, "piece": piece, "window": options.window}
    arguments = [f"--{name}={value}" for name, value in inputs.items()]
    done = subprocess.run(
        [sys.executable, __file__, *arguments, f"--dtype={options.dtype}"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="8192,32768")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--piece", type=int, default=1024, help="tokens of a prefill chunk; 0: all")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--against", type=Path, help="checkout to compare with")
    parser.add_argument("--against-piece", type=int, help="--piece of that checkout")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(read_once(options)))
        return
    checkouts = {"here": (HERE, options.piece)}
    if options.against:
        piece = options.piece if options.against_piece is None else options.against_piece
        checkouts["against"] = (options.against.resolve(), piece)
    rows = []
    print("| tokens | checkout | peak grows by, MB | of it cache, MB | time to `against` |")
    print("|---|---|---|---|---|")
    for n in map(int, options.tokens.split(",")):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for _ in range(options.repeats):
            for name, (folder, piece) in checkouts.items():
                runs[name].append(run(folder, n, piece, options))
        for name, figures in runs.items():
            row: dict[str, Any] = {"tokens": n, "checkout": name, "piece": checkouts[name][1]}
            row |= {key: median(each[key] for each in figures) for key in figures[0]}
            rows.append(row)
            ratio = ""
            if options.against:
                pairs = zip(figures, runs["against"], strict=True)
                row["ratio"] = median(a["seconds"] / b["seconds"] for a, b in pairs)
                ratio = f"{row['ratio']:.2f}"
            print(f"| {n} | {name} | {row['grown_MB']:.0f} | {row['cache_MB']:.0f} | {ratio} |")
    if options.json:
        options.json.write_text(json.dumps({"rows": rows}))


if __name__ == "__main__":
    main()
