"""What whole steps cost on an accelerator: draft stub to commit, over a random-weight Llama of 8 B.

    python benchmarks/gpu_probe.py --json gpu.json [--only single,batch,compile,context,draft]
    python benchmarks/gpu_probe.py --small --json small.json

single   one text: plain, 16 and 32 rows, after 512, 4,096 and 32,768 tokens; today's step and graph
batch    16 texts, greedy and top-p, and what the forward alone takes of these
context  drafter "context": the time of a step in which the device has nothing to do
draft    a draft model of 1 B, five levels
compile  the same for compiled steps, as many as there is time for

Weights are made on the device and nothing is downloaded. The model always says one token, so that
what is accepted is known; nothing is read before the steps: the cache holds as many zeros. Each
figure is a median over interleaved rounds, set against the time in which the weights and the cache
can be read at the bandwidth of a copy. What does not fit, or finds no time, is named with the
reason. --small measures nothing: a toy that shows that the script runs, on the CPU too.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
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


def tables(rows: Sequence[Row], result: Sequence[Row]) -> Iterator[str]:
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
    for bar in result:
        met = {None: "", True: "yes", False: "no"}[bar["met"]]
        yield f"| {bar['name']} | {bar['bar']} | {bar['measured']} | {bar['mode'] or ''} | {met} |"


def described(probe: Probe, options: argparse.Namespace) -> dict[str, Any]:
    """Return what the figures were measured on."""
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
    """Return what was asked for, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--small", action="store_true", help="a toy size, to try the script")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, with commas between them")
    parser.add_argument("--modes", help="of off, eager, graph and compile, with commas")
    parser.add_argument("--repeats", type=int, help=f"rounds after one to warm up, {REPEATS}")
    parser.add_argument("--seconds", type=float, default=540, help="after which no case is begun")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        options.device = pick_device(options.device)
    except InputError as error:
        parser.error(str(error))
    options.only = options.only.split(",")
    cuda = is_cuda(options.device)
    usual = "off,graph,compile" if cuda else "off,eager"
    options.modes = (options.modes or usual).split(",")
    for name, inputs, known in (
        ("--only", options.only, PARTS),
        ("--modes", options.modes, ("off", "eager", "graph", "compile")),
    ):
        if strange := [each for each in inputs if each not in known]:
            parser.error(f"got {name} {strange[0]!r}; expected some of {', '.join(known)}")
    if not (cuda or options.small):
        parser.error(
            f"got {options.device} without --small; expected a CUDA device, which a model of 8 B "
            "is measured on. Run this where there is one, or give --small to try the script here."
        )
    if "graph" in options.modes and not cuda:
        parser.error(f"got --modes graph for {options.device}; expected a CUDA device, or 'eager'")
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"got --repeats {options.repeats}; expected at least 1")
    return options


def main() -> None:
    """Run the probe, print its tables and keep them."""
    options = read_options()
    with tempfile.TemporaryDirectory() as folder:  # what is found out here is for here alone
        _probe(options, Path(folder))


def _probe(options: argparse.Namespace, folder: Path) -> None:
    began = time.perf_counter()
    probe = Probe(options.device, folder, options.repeats, options.seconds, small=options.small)
    print(f"| {' | '.join([*COLUMNS, *FIGURES])} |")
    print("| --- " * (len(COLUMNS) + len(FIGURES)) + "|")
    rows = list(
        measure(probe, options.only, options.modes, lambda row: print(line(row), flush=True))
    )
    result = bars(rows, measured=is_cuda(options.device) and not options.small)
    print("\n".join(tables(rows, result)))
    if options.json:
        document = {
            **described(probe, options),
            "seconds": time.perf_counter() - began,
            "cases": rows,
            "bars": result,
        }
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
