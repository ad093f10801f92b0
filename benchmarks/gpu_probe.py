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
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gpu_models as models
import torch
import transformers
from gpu_bars import bars
from gpu_counts import counted
from gpu_steps import Cell, Seat, Stub, rotated, seats

import ragspec
from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.errors import InputError
from ragspec.models.device import is_cuda, out_of_memory, pick_device

PARTS = ("single", "batch", "context", "draft", "compile")
ROWS = (1, 16, 32)
LENGTHS = (512, 4096, 32_768)
SMALL_LENGTHS = (48, 96, 192)
BATCH, SMALL_BATCH = 16, 4
STEPS, SMALL_STEPS = 8, 2  # timed in one sample
REPEATS, SMALL_REPEATS = 7, 2
LEVELS = 5  # of the draft model
CONTEXT_NODES = 15
Row = dict[str, Any]


def cells(lengths: Sequence[int], texts: int) -> list[Cell]:
    """Return what is measured, in the order of how much is known by it."""
    single = [Cell("single", 1, length, rows) for length in lengths for rows in ROWS]
    batch = [
        Cell("batch", texts, length, rows, law)
        for length in lengths
        for rows in ROWS
        for law in ("greedy", "top-p")
    ]
    drafted = [
        Cell(part, 1, length, None, drafter=part)
        for part in ("context", "draft")
        for length in lengths[:2]
    ]
    return single + batch + drafted


class Probe:
    """The models on a device, an engine for each way to step and to draft, and the clock."""

    def __init__(self, device: torch.device, repeats: int, seconds: float, *, small: bool) -> None:
        self.device, self.repeats = device, repeats
        self.ends = time.perf_counter() + seconds
        self.steps = SMALL_STEPS if small else STEPS
        self.cells = cells(*((SMALL_LENGTHS, SMALL_BATCH) if small else (LENGTHS, BATCH)))
        self.bandwidth = models.bandwidth(device, 16 << 20 if small else 2 << 30)
        dtype = torch.bfloat16 if is_cuda(device) else torch.float32
        sizes = models.SMALL_TARGET if small else models.TARGET
        self.model = models.make_model(sizes, device, dtype)
        draft = models.SMALL_DRAFT if small else models.DRAFT
        self._make_draft = lambda: models.make_model(draft, device, dtype)
        self._folder = tempfile.TemporaryDirectory()  # what was probed here is for here alone
        self._targets: dict[str, Engine] = {}
        self._engines: dict[tuple[str, str, int | None], Engine] = {}
        self._drafter: ModelDrafter | None = None
        self._compiling = 0.0  # seconds that the last compiled cell took to begin

    def engine(self, mode: str, cell: Cell) -> Engine:
        """Return the engine that takes a cell's steps in a mode."""
        if mode not in self._targets:
            folder = Path(self._folder.name)
            self._targets[mode] = Engine(self.model, None, None, static=mode, cache=folder)
        key = mode, cell.drafter, cell.rows
        if key not in self._engines:
            self._engines[key] = self._targets[mode].drafting(*self._drafting(cell))
        return self._engines[key]

    def _drafting(self, cell: Cell) -> tuple[Any, int]:
        """Return a cell's drafter and its nodes."""
        if cell.drafter == "context":
            return "context", CONTEXT_NODES
        if cell.drafter == "draft":
            if self._drafter is None:
                self._drafter = ModelDrafter(self._make_draft(), depth=LEVELS, width=1, worth=0)
            return self._drafter, LEVELS
        assert cell.rows is not None
        return (Stub(), cell.rows - 1) if cell.rows > 1 else (None, 0)

    def floor(self, cell: Cell) -> float:
        """Return the milliseconds in which the bytes of a step are read, the draft model's too."""
        least = models.Floor.of(self.model, self.bandwidth).milliseconds(cell.batch, cell.length)
        if cell.drafter == "draft" and self._drafter is not None:
            draft = models.Floor.of(self._drafter.model.model, self.bandwidth)
            least += LEVELS * draft.milliseconds(cell.batch, cell.length)
        return least

    def rows(self, cell: Cell, modes: Sequence[str], work: Work) -> Iterator[Row]:
        """Yield what `work` finds in each mode, or why it finds nothing."""
        reasons: dict[str, str] = {}
        found: Mapping[str, Row] = {}
        if reason := self._late("compile" in modes):
            reasons = dict.fromkeys(modes, reason)
        else:
            try:
                engines = {mode: self.engine(mode, cell) for mode in modes}
                with seats(engines, cell, reasons) as seated:
                    found = work(self, cell, seated)
            except Exception as error:
                reasons = dict.fromkeys(modes, _bearable(error, modes))
                self._forget(modes)
        for mode in modes:
            row = {**cell.told, "mode": mode}
            if mode in found and self.engine(mode, cell).target.static != mode:
                reasons[mode] = "memory ended while a step was captured"
                self._forget([mode])
            yield {**row, "skipped": reasons[mode]} if mode in reasons else {**row, **found[mode]}

    def _forget(self, modes: Sequence[str]) -> None:
        """Let targets that something has failed in go, with all their memory."""
        for mode in modes:
            self._targets.pop(mode, None)
        self._engines = {key: made for key, made in self._engines.items() if key[0] not in modes}

    def _late(self, compiles: bool) -> str:
        left = self.ends - time.perf_counter()
        needed = 1.5 * self._compiling if compiles else 0.0
        if left > needed:
            return ""
        return f"{max(0.0, left):.0f} s are left (--seconds)" + (
            f" and it takes some {needed:.0f} to compile" if needed else ""
        )

    def began(self, mode: str, seconds: float) -> None:
        """Learn how long the first steps of a cell took."""
        if mode == "compile":
            self._compiling = seconds


def _bearable(error: Exception, modes: Sequence[str]) -> str:
    """Return what is told of a cell that failed; raises what is not to be borne."""
    if out_of_memory(error):
        return "memory ended"
    if "compile" in modes and isinstance(error, RuntimeError):  # torch's own compiler, not ours
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    raise error


Work = Callable[[Probe, Cell, dict[str, Seat]], dict[str, Row]]


def timed(probe: Probe, cell: Cell, seated: dict[str, Seat]) -> dict[str, Row]:
    """Return the medians and quartiles of each mode, over rounds that take the modes in turn."""
    samples: dict[str, list[Row]] = {mode: [] for mode in seated}
    alone = cell.part == "batch" and cell.rows == 16 and cell.law == "top-p"
    for repeat in range(probe.repeats + 1):  # the first round captures, or compiles
        for mode in rotated(list(seated), repeat):
            began = time.perf_counter()
            sample = seated[mode].sample(probe.steps)
            if alone:
                sample["forward_ms"] = seated[mode].forward(probe.steps)
            if repeat:
                samples[mode].append(sample)
            else:
                probe.began(mode, time.perf_counter() - began)
    floor = probe.floor(cell)
    return {mode: _summary(each, floor) for mode, each in samples.items()}


def _summary(samples: Sequence[Row], floor: float) -> Row:
    row = {name: median(sample[name] for sample in samples) for name in samples[0]}
    every = [sample["ms"] for sample in samples]
    low, _, high = quantiles(every, n=4, method="inclusive") if len(every) > 1 else every * 3
    return {
        **row,
        "ms_q1": low,
        "ms_q3": high,
        "floor_ms": floor,
        "over_floor": row["ms"] / floor,
    }


def counts(probe: Probe, cell: Cell, seated: dict[str, Seat]) -> dict[str, Row]:
    """Return what one step asks of the device, in each mode."""
    found = {}
    for mode, seat in seated.items():
        with seat.begun() as loop:
            found[mode] = counted(loop.step, probe.device)
    return found


def both(probe: Probe, cell: Cell, seated: dict[str, Seat]) -> dict[str, Row]:
    """Return times and counts: what was compiled is not compiled again for the latter."""
    first, second = timed(probe, cell, seated), counts(probe, cell, seated)
    return {mode: {**first[mode], **second[mode]} for mode in first}


def measure(probe: Probe, parts: Sequence[str], modes: Sequence[str]) -> Iterator[Row]:
    """Yield a row for each cell and mode."""
    wanted = [cell for cell in probe.cells if cell.part in parts]
    plain = [mode for mode in modes if mode != "compile"]
    found = [row for cell in wanted for row in _told(probe.rows(cell, plain, timed))]
    # The profiler leaves launches slower behind it, so that all is timed before.
    places = {_key(row): row for row in found}
    for cell in wanted:
        if all("skipped" in places[_key({**cell.told, "mode": mode})] for mode in plain):
            continue
        for row in probe.rows(cell, plain, counts):
            place = places[_key(row)]
            if "skipped" not in place:
                place["not_counted" if "skipped" in row else "counted"] = row.get("skipped", True)
                place.update({k: v for k, v in row.items() if k not in place and k != "skipped"})
    yield from map(_idle, found)
    if "compile" in parts and "compile" in modes:
        for cell in _by_worth(probe.cells):
            yield from map(_idle, _told(probe.rows(cell, ["compile"], both)))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("part", "batch", "length", "rows", "law", "mode"))


def _by_worth(every: Sequence[Cell]) -> list[Cell]:
    """Return the cells with those first that bars are about: to compile one takes a minute."""

    def about(cell: Cell) -> bool:
        batch = (cell.rows, cell.law, cell.length) == (16, "top-p", every[0].length)
        return (cell.part == "single" and cell.rows != 16) or (cell.part == "batch" and batch)

    return sorted(every, key=lambda cell: not about(cell))


def _told(rows: Iterator[Row]) -> Iterator[Row]:
    """Print rows as they are found."""
    for row in rows:
        print(line(row), flush=True)
        yield row


def _idle(row: Row) -> Row:
    """Add the time of a step in which the device did nothing, where that is known."""
    if row.get("kernels") and "ms" in row:
        row["host_idle_ms"] = max(0.0, row["ms"] - row["busy_ms"])
    return row


COLUMNS = ("part", "batch", "length", "rows", "law", "mode")
FIGURES = ("ms", "ms_q1", "ms_q3", "floor_ms", "over_floor", "draft_ms", "forward_ms", "tokens")
COUNTS = ("launches", "graphs", "copies", "waits", "kernels", "busy_ms", "host_idle_ms")


def line(row: Row) -> str:
    """Return a row of the first table."""
    first = [str("" if row[name] is None else row[name]) for name in COLUMNS]
    if "skipped" in row:
        return f"| {' | '.join(first)} | not measured: {row['skipped']} |"
    figures = [f"{row[name]:.4g}" if name in row else "" for name in FIGURES]
    return f"| {' | '.join([*first, *figures])} |"


def tables(rows: Sequence[Row], found: Sequence[Row]) -> Iterator[str]:
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
    for bar in found:
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
        "repeats": options.repeats,
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
    for name, given, known in (
        ("--only", options.only, PARTS),
        ("--modes", options.modes, ("off", "eager", "graph", "compile")),
    ):
        if strange := [each for each in given if each not in known]:
            parser.error(f"got {name} {strange[0]!r}; expected some of {', '.join(known)}")
    if not (cuda or options.small):
        parser.error(
            f"got {options.device} without --small; expected a CUDA device, which a model of 8 B "
            "is measured on. Run this where there is one, or give --small to try the script here."
        )
    if "graph" in options.modes and not cuda:
        parser.error(f"got --modes graph for {options.device}; expected a CUDA device, or 'eager'")
    if options.repeats is None:
        options.repeats = SMALL_REPEATS if options.small else REPEATS
    if options.repeats < 1:
        parser.error(f"got --repeats {options.repeats}; expected at least 1")
    return options


def main() -> None:
    """Run the probe, print its tables and keep them."""
    options = read_options()
    began = time.perf_counter()
    warnings.simplefilter("once")
    probe = Probe(options.device, options.repeats, options.seconds, small=options.small)
    print(f"| {' | '.join([*COLUMNS, *FIGURES])} |")
    print("| --- " * (len(COLUMNS) + len(FIGURES)) + "|")
    rows = list(measure(probe, options.only, options.modes))
    found = bars(rows, measured=is_cuda(options.device) and not options.small)
    print("\n".join(tables(rows, found)))
    if options.json:
        document = {
            **described(probe, options),
            "seconds": time.perf_counter() - began,
            "cases": rows,
            "bars": found,
        }
        options.json.write_text(json.dumps(document, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
