"""Prefill and decoding of long contexts, against transformers on a copy of the model.

    python benchmarks/lengths.py --model smollm2 --data DIR [--lengths 512,7500] [--dtype float32]

For every length the script measures seconds to the first token after the start of a book of DIR's
longdocs/, and milliseconds of each of the 32 tokens after that. Greedy `generate` of transformers
and plain decoding by this engine are interleaved. It also measures the time of forwards over 4, 8
and 16 positions by that of a single position. Ratios above 1 mean that transformers is slower.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch
from harness.token_clock import TokenClock

from ragspec.engine.engine import Engine
from ragspec.models.load import load_model
from ragspec.pipelines.console.options import silence_transformers

NEW_TOKENS = 33
WARM_UP = 64  # prompt tokens of the warm-up
ROWS = (4, 8, 16)


def beginning(data: Path, tokenizer: Any, length: int) -> list[int]:
    """Return the first tokens of a book."""
    path = sorted((data / "longdocs").glob("*.txt.gz"))[0]
    with gzip.open(path, "rt", encoding="utf-8") as file:
        ids = tokenizer(file.read(12 * length), add_special_tokens=False, verbose=False)
    return list(ids["input_ids"][:length])


def row(engine: Engine, peer: Any, prompt: list[int], repeats: int) -> str:
    """Return the line of one length, medians over the repeats."""

    def theirs(tokens: int, start: int = 0) -> list[float]:
        ids, clock = torch.tensor([prompt[start:]]), TokenClock()
        options = {"do_sample": False, "max_new_tokens": tokens, "min_new_tokens": tokens}
        peer.generate(ids, attention_mask=torch.ones_like(ids), streamer=clock, **options)
        return clock.times[1:]

    def ours(tokens: int, start: int = 0) -> list[float]:
        times: list[float] = []
        engine.generate(
            prompt[start:],
            max_new_tokens=tokens,
            ignore_eos=True,
            on_step=lambda number, step: times.append(time.perf_counter()),
        )
        return times

    for run in (theirs, ours):
        run(4, -WARM_UP)
    runs: dict[str, list[tuple[float, float]]] = {"theirs": [], "ours": []}
    for repeat in range(repeats):
        for name, run in (("theirs", theirs), ("ours", ours))[:: 1 if repeat % 2 else -1]:
            began = time.perf_counter()
            times = run(NEW_TOKENS)
            each = 1000 * (times[-1] - times[0]) / (NEW_TOKENS - 1)
            runs[name].append((times[0] - began, each))
    prefill = [median(times[0] for times in runs[name]) for name in runs]
    decode = [median(times[1] for times in runs[name]) for name in runs]
    single = min(engine.target.time_forward(1, len(prompt)) for _ in range(2))
    trees = " / ".join(f"{engine.target.time_forward(n, len(prompt)) / single:.2f}" for n in ROWS)
    return (
        f"| {len(prompt)} | {prefill[0]:.1f} / {prefill[1]:.1f} | {prefill[0] / prefill[1]:.2f} "
        f"| {decode[0]:.0f} / {decode[1]:.0f} | {decode[0] / decode[1]:.2f} | {trees} |"
    )


def main() -> None:
    """Measure every length and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="512,2000,7500")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    silence_transformers()
    torch.set_num_threads(1)
    model, tokenizer = load_model(options.model, "cpu", options.dtype)
    engine, peer = Engine(model, tokenizer, None), copy.deepcopy(model)
    print("| tokens | prefill, s (HF / ours) | ratio | a token, ms | ratio | 4 / 8 / 16 to 1 |")
    print("| --- " * 6 + "|")
    for length in map(int, options.lengths.split(",")):
        prompt = beginning(options.data, tokenizer, length)
        print(row(engine, peer, prompt, options.repeats), flush=True)


if __name__ == "__main__":
    main()
