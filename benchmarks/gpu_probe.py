"""The cost of whole steps on an accelerator, draft to commit, of a random-weight Llama of 8 B.

    python benchmarks/gpu_probe.py --json gpu.json [--only single,batch,compile,context,draft]
    python benchmarks/gpu_probe.py --small --json small.json

single   one sequence: plain, 16 and 32 rows, after 512, 4,096, 32,768 tokens; today's step, graph
batch    16 sequences, greedy and top-p, and the time of their forward alone
context  drafter "context": the idle time of the device in a step
draft    a draft model of 1 B, five levels
compile  the same with compiled steps, within the time limit

Weights are random, and nothing is downloaded. The model always generates one token, so the accepted
tokens are fixed. The steps need no prefill: the KV cache holds zeros. Each figure is a median over
interleaved rounds, by the time to read weights and KV cache at the bandwidth of a copy. Cells
without enough memory or time are listed with the reason. --small runs toy models, on the CPU too,
to test the script; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import gpu_models as models
import torch
import transformers
from gpu_bars import bars
from gpu_measure import REPEATS, Probe, Row, measure

import ragspec
from ragspec.errors import InputError
from ragspec.models.device import is_cuda, pick_device

PARTS = ("single", "batch", "context", "draft", "compile")
COLUMNS = ("part", "batch", "length", "rows", "distribution", "mode")
FIGURES = ("ms", "ms_q1", "ms_q3", "floor_ms", "over_floor", "draft_ms", "forward_ms", "tokens")
COUNTS = ("launches", "graphs", "copies", "waits", "kernels", "busy_ms", "host_idle_ms")


def line(row: Row) -> str:
    """Return a row of the first table."""
    first = [str("" if row[name] is None else row[name]) for name in COLUMNS]
    if "skipped" in row:
        return f"| {' | '.join(first)} | not measured: {row['skipped']} |"
    figures = [f"{row[name]:.4g}" if name in row else "" for name in FIGURES]
    return f"| {' | '.join([*first, *figures])} |"


def tables(rows: Sequence[Row], goals: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of the tables of counts and of bars."""
    names = [name for name in (*COUNTS, "operators") if any(name in row for row in rows)]
    yield f"\n| {' | '.join([*COLUMNS, *names])} |"
    yield "| --- " * (len(COLUMNS) + len(names)) + "|"
    for row in rows:
        if any(name in row for name in names):
            first = [str("" if row[name] is None else row[name]) for name in COLUMNS]
            counts = [f"{row[name]:.4g}" if name in row else "" for name in names]
            yield f"| {' | '.join(first + counts)} |"
    yield "\n| bar | | measured | mode | met |\n| --- | --- | --- | --- | --- |"
    for bar in goals:
        met = {None: "", True: "yes", False: "no"}[bar["met"]]
        yield f"| {bar['name']} | {bar['bar']} | {bar['measured']} | {bar['mode'] or ''} | {met} |"


def describe(probe: Probe, options: argparse.Namespace) -> dict[str, Any]:
    """Return the device, versions and models of the figures."""
    cuda = is_cuda(probe.device)
    return {
        "device": torch.cuda.get_device_name(probe.device) if cuda else str(probe.device),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "ragspec": ragspec.__version__,
        },
        "label": "toy sizes, nothing is measured" if options.small else "random weights",
        "dtype": str(probe.model.dtype).removeprefix("torch."),
        "parameters": sum(each.numel() for each in probe.model.parameters()),
        "weight_bytes": models.weight_bytes(probe.model),
        "copy_GB_per_second": probe.bandwidth / 1e9,
        "repeats": probe.repeats,
    }


def read_options() -> argparse.Namespace:
    """Return the validated options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="use toy models to test the script")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated")
    parser.add_argument("--modes", help="off, eager, graph or compile, comma-separated")
    parser.add_argument("--repeats", type=int, help=f"rounds after a warm-up, default {REPEATS}")
    parser.add_argument(
        "--seconds", type=float, default=540, help="time limit; no case starts after it"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        options.device = pick_device(options.device)
    except InputError as error:
        parser.error(str(error))
    options.only = options.only.split(",")
    cuda = is_cuda(options.device)
    default = "off,graph,compile" if cuda else "off,eager"
    options.modes = (options.modes or default).split(",")
    for name, inputs, choices in (
        ("--only", options.only, PARTS),
        ("--modes", options.modes, ("off", "eager", "graph", "compile")),
    ):
        if unknown := [each for each in inputs if each not in choices]:
            parser.error(f"got {name} {unknown[0]!r}; expected some of {', '.join(choices)}")
    if not (cuda or options.small):
        parser.error(
            f"got {options.device} without --small; expected a CUDA device for the model of 8 B. "
            "Run the script on one, or add --small to test it here."
        )
    if "graph" in options.modes and not cuda:
        parser.error(f"got --modes graph for {options.device}; expected a CUDA device, or 'eager'")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"got --repeats {options.repeats}; expected at least 1")
    return options


def main() -> None:
    """Run the probe, print its tables and write them."""
    options = read_options()
    began = time.perf_counter()
    probe = Probe(options.device, options.repeats, options.seconds, small=options.small)
    print(f"| {' | '.join([*COLUMNS, *FIGURES])} |")
    print("| --- " * (len(COLUMNS) + len(FIGURES)) + "|")
    rows = list(
        measure(probe, options.only, options.modes, lambda row: print(line(row), flush=True))
    )
    goals = bars(rows, measured=is_cuda(options.device) and not options.small)
    print("\n".join(tables(rows, goals)))
    if options.json:
        document = {
            **describe(probe, options),
            "seconds": time.perf_counter() - began,
            "cases": rows,
            "bars": goals,
        }
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
