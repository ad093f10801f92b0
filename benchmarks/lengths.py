"""Reading and writing after long contexts, against transformers on its own copy of the model.

    python benchmarks/lengths.py --model smollm2 --data DIR [--lengths 512,7500] [--dtype float32]

For every length: seconds until the first token after a beginning of a book of DIR's longdocs/, and
milliseconds for each of the 32 after that, of transformers' greedy `generate` and of plain decoding
by this engine, in turn; and what forwards of 4, 8 and 16 positions cost
against one of one. Ratios above 1 say that transformers is slower.
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

WRITTEN = 33
WARMING = 64  # tokens of a prompt by which both are warmed up
ROWS = (4, 8, 16)


def beginning(data: Path, tokenizer: Any, length: int) -> list[int]:
    """Return the first tokens of a book."""
    path = sorted((data / "longdocs").glob("*.txt.gz"))[0]
    with gzip.open(path, "rt", encoding="utf-8") as file:
        ids = tokenizer(file.read(12 * length), add_special_tokens=False, verbose=False)
    return list(ids["input_ids"][:length])


def row(engine: Engine, peer: Any, prompt: list[int], repeats: int) -> str:
    """Return the line of one length: medians over the repeats."""

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
        run(4, -WARMING)
    runs: dict[str, list[tuple[float, float]]] = {"theirs": [], "ours": []}
    for repeat in range(repeats):
        for name, run in (("theirs", theirs), ("ours", ours))[:: 1 if repeat % 2 else -1]:
            began = time.perf_counter()
            times = run(WRITTEN)
            each = 1000 * (times[-1] - times[0]) / (WRITTEN - 1)
            runs[name].append((times[0] - began, each))
    read = [median(result[0] for result in runs[name]) for name in runs]
    write = [median(result[1] for result in runs[name]) for name in runs]
    alone = min(engine.target.time_forward(1, len(prompt)) for _ in range(2))
    trees = " / ".join(f"{engine.target.time_forward(n, len(prompt)) / alone:.2f}" for n in ROWS)
    return (
        f"| {len(prompt)} | {read[0]:.1f} / {read[1]:.1f} | {read[0] / read[1]:.2f} "
        f"| {write[0]:.0f} / {write[1]:.0f} | {write[0] / write[1]:.2f} | {trees} |"
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
    print("| tokens | reading, s (HF / ours) | ratio | a token, ms | ratio | 4 / 8 / 16 to 1 |")
    print("| --- " * 6 + "|")
    for length in map(int, options.lengths.split(",")):
        prompt = beginning(options.data, tokenizer, length)
        print(row(engine, peer, prompt, options.repeats), flush=True)


if __name__ == "__main__":
    main()
