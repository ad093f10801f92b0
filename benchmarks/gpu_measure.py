"""The cells of the probe, and how they are measured: in rounds, with all ways to step in turn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import gpu_models as models
import torch
from gpu_counts import counted
from gpu_steps import Cell, Seat, Stub, rotated, seats

from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.models.device import is_cuda, out_of_memory

Row = dict[str, Any]
ROWS = (1, 16, 32)
LENGTHS = (512, 4096, 32_768)
SMALL_LENGTHS = (48, 96, 192)
BATCH, SMALL_BATCH = 16, 4
STEPS, SMALL_STEPS = 8, 2  # timed in one sample
REPEATS, SMALL_REPEATS = 7, 2
LEVELS = 5  # of the draft model
CONTEXT_NODES = 15


def cells(lengths: Sequence[int], texts: int) -> list[Cell]:
    """Return what is measured, in the order of how much is known by it."""
    single = [Cell("single", 1, length, rows) for length in lengths for rows in ROWS]
    batch = [
        Cell("batch", texts, length, rows, distribution)
        for length in lengths
        for rows in ROWS
        for distribution in ("greedy", "top-p")
    ]
    drafted = [
        Cell(part, 1, length, None, drafter=part)
        for part in ("context", "draft")
        for length in lengths[:2]
    ]
    return single + batch + drafted


class Probe:
    """The models on a device, an engine for each way to step and to draft, and the clock.

    folder: keeps what was found out about the models. repeats: rounds, None for the usual number.
    seconds: after which nothing is begun.
    """

    def __init__(
        self,
        device: torch.device,
        folder: Path,
        repeats: int | None,
        seconds: float,
        *,
        small: bool,
    ) -> None:
        self.device, self._folder = device, folder
        self.repeats = repeats or (SMALL_REPEATS if small else REPEATS)
        self.ends = time.perf_counter() + seconds
        self.steps = SMALL_STEPS if small else STEPS
        self.cells = cells(*((SMALL_LENGTHS, SMALL_BATCH) if small else (LENGTHS, BATCH)))
        self.bandwidth = models.bandwidth(device, 16 << 20 if small else 2 << 30)
        dtype = torch.bfloat16 if is_cuda(device) else torch.float32
        sizes = models.SMALL_TARGET if small else models.TARGET
        self.model = models.make_model(sizes, device, dtype)
        draft = models.SMALL_DRAFT if small else models.DRAFT
        self._make_draft = lambda: models.make_model(draft, device, dtype)
        self._targets: dict[str, Engine] = {}
        self._engines: dict[tuple[str, str, int | None], Engine] = {}
        self._drafter: ModelDrafter | None = None
        self._compiling = 0.0  # seconds that the last compiled cell took to begin

    def engine(self, mode: str, cell: Cell) -> Engine:
        """Return the engine that takes a cell's steps in a mode."""
        if mode not in self._targets:
            self._targets[mode] = Engine(self.model, None, None, static=mode, cache=self._folder)
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
                self._drafter = ModelDrafter(
                    self._make_draft(), depth=LEVELS, width=1, min_expected_gain=0
                )
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
        record: Mapping[str, Row] = {}
        if reason := self._late("compile" in modes):
            reasons = dict.fromkeys(modes, reason)
        else:
            try:
                engines = {mode: self.engine(mode, cell) for mode in modes}
                with seats(engines, cell, reasons) as seated:
                    record = work(self, cell, seated)
            except Exception as error:
                reasons = dict.fromkeys(modes, _bearable(error, modes))
                self._forget(modes)
        for mode in modes:
            row = {**cell.reported, "mode": mode}
            if mode in record and self.engine(mode, cell).target.static != mode:
                reasons[mode] = "memory ended while a step was captured"
                self._forget([mode])
            yield {**row, "skipped": reasons[mode]} if mode in reasons else {**row, **record[mode]}

    def _forget(self, modes: Sequence[str]) -> None:
        """Let targets that something has failed in go, with all their memory."""
        for mode in modes:
            self._targets.pop(mode, None)
        self._engines = {
            key: instance for key, instance in self._engines.items() if key[0] not in modes
        }

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


Report = Callable[[Row], None]
Work = Callable[[Probe, Cell, dict[str, Seat]], dict[str, Row]]


def timed(probe: Probe, cell: Cell, seated: dict[str, Seat]) -> dict[str, Row]:
    """Return the medians and quartiles of each mode, over rounds that take the modes in turn."""
    samples: dict[str, list[Row]] = {mode: [] for mode in seated}
    alone = cell.part == "batch" and cell.rows == 16 and cell.distribution == "top-p"
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
    return {**row, "ms_q1": low, "ms_q3": high, "floor_ms": floor, "over_floor": row["ms"] / floor}


def counts(probe: Probe, cell: Cell, seated: dict[str, Seat]) -> dict[str, Row]:
    """Return what one step asks of the device, in each mode."""
    record = {}
    for mode, seat in seated.items():
        with seat.begun() as loop:
            record[mode] = counted(loop.step, probe.device)
    return record


def both(probe: Probe, cell: Cell, seated: dict[str, Seat]) -> dict[str, Row]:
    """Return times and counts: what was compiled is not compiled again for the latter."""
    first, second = timed(probe, cell, seated), counts(probe, cell, seated)
    return {mode: {**first[mode], **second[mode]} for mode in first}


def measure(
    probe: Probe, parts: Sequence[str], modes: Sequence[str], notify: Report
) -> Iterator[Row]:
    """Yield a row for each cell and mode; they are printed by `notify` as they are found."""
    selection = [cell for cell in probe.cells if cell.part in parts]
    # Where there is memory for one way alone, it is not today's.
    plain = sorted((mode for mode in modes if mode != "compile"), key=lambda mode: mode == "off")
    results = [
        row for cell in selection for row in _notify_each(probe.rows(cell, plain, timed), notify)
    ]
    # The profiler leaves launches slower behind it, so that all is timed before.
    places = {_key(row): row for row in results}
    for cell in selection:
        if all("skipped" in places[_key({**cell.reported, "mode": mode})] for mode in plain):
            continue
        for row in probe.rows(cell, plain, counts):
            place = places[_key(row)]
            if "skipped" not in place:
                place["not_counted" if "skipped" in row else "counted"] = row.get("skipped", True)
                place.update({k: v for k, v in row.items() if k not in place and k != "skipped"})
    yield from map(_idle, results)
    if "compile" in parts and "compile" in modes:
        for cell in _by_gain(probe.cells):
            yield from map(_idle, _notify_each(probe.rows(cell, ["compile"], both), notify))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("part", "batch", "length", "rows", "distribution", "mode"))


def _by_gain(every: Sequence[Cell]) -> list[Cell]:
    """Return the cells with those first that bars are about: to compile one takes a minute."""

    def about(cell: Cell) -> bool:
        batch = (cell.rows, cell.distribution, cell.length) == (16, "top-p", every[0].length)
        return (cell.part == "single" and cell.rows != 16) or (cell.part == "batch" and batch)

    return sorted(every, key=lambda cell: not about(cell))


def _notify_each(rows: Iterator[Row], notify: Report) -> Iterator[Row]:
    for row in rows:
        notify(row)
        yield row


def _idle(row: Row) -> Row:
    """Add the time of a step in which the device did nothing, where that is known."""
    if row.get("kernels") and "ms" in row:
        row["host_idle_ms"] = max(0.0, row["ms"] - row["busy_ms"])
    return row
