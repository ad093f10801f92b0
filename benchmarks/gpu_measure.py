"""The cells of the probe and their measurement: in rounds, all modes interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, quantiles
from typing import Any

import gpu_models as models
import torch
from gpu_counts import count_step
from gpu_steps import Cell, CellSession, Stub, open_cells, rotated

from ragspec.drafters.model.drafter import ModelDrafter
from ragspec.engine.engine import Engine
from ragspec.models.device import is_cuda, out_of_memory
from ragspec.verification.open import open_target

Row = dict[str, Any]
ROWS = (1, 16, 32)
LENGTHS = (512, 4096, 32_768)
SMALL_LENGTHS = (48, 96, 192)
BATCH, SMALL_BATCH = 16, 4
STEPS, SMALL_STEPS = 8, 2  # steps of a sample
REPEATS, SMALL_REPEATS = 7, 2
LEVELS = 5  # levels of the draft model
CONTEXT_NODES = 15


def cells(lengths: Sequence[int], batch_size: int) -> list[Cell]:
    """Return the cells to measure, the most informative first."""
    single = [Cell("single", 1, length, rows) for length in lengths for rows in ROWS]
    batch = [
        Cell("batch", batch_size, length, rows, distribution)
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
    """The models on a device, and an engine for each mode and drafter.

    Args:
        device: Device of the models.
        repeats: Rounds; None for the default.
        seconds: Time limit; no cell starts after it.
        small: Whether to use toy models.
    """

    def __init__(
        self, device: torch.device, repeats: int | None, seconds: float, *, small: bool
    ) -> None:
        self.device = device
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
        self._compiling = 0.0  # seconds of the first steps of the last compiled cell

    def engine(self, mode: str, cell: Cell) -> Engine:
        """Return the engine of a cell in a mode."""
        if mode not in self._targets:
            self._targets[mode] = Engine(open_target(self.model, mode), None, None)
        key = mode, cell.drafter, cell.rows
        if key not in self._engines:
            self._engines[key] = self._targets[mode].with_drafter(*self._drafting(cell))
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
        """Return the milliseconds to read the bytes of a step, the draft model's included."""
        least = models.Floor.of(self.model, self.bandwidth).milliseconds(cell.batch, cell.length)
        if cell.drafter == "draft" and self._drafter is not None:
            draft = models.Floor.of(self._drafter.model.model, self.bandwidth)
            least += LEVELS * draft.milliseconds(cell.batch, cell.length)
        return least

    def rows(self, cell: Cell, modes: Sequence[str], work: Work) -> Iterator[Row]:
        """Yield the figures of `work` in each mode, or the reason why it has none."""
        reasons: dict[str, str] = {}
        figures: Mapping[str, Row] = {}
        if reason := self._time_limit("compile" in modes):
            reasons = dict.fromkeys(modes, reason)
        else:
            try:
                engines = {mode: self.engine(mode, cell) for mode in modes}
                with open_cells(engines, cell, reasons) as sessions:
                    figures = work(self, cell, sessions)
            except Exception as error:
                reasons = dict.fromkeys(modes, _failure_reason(error, modes))
                self._forget(modes)
        for mode in modes:
            row = {**cell.fields, "mode": mode}
            if mode in figures and self.engine(mode, cell).target.static != mode:
                reasons[mode] = "a step could not be captured, see the warning"
                self._forget([mode])
            yield {**row, "skipped": reasons[mode]} if mode in reasons else {**row, **figures[mode]}

    def _forget(self, modes: Sequence[str]) -> None:
        """Drop the targets of failed modes with all their memory."""
        for mode in modes:
            self._targets.pop(mode, None)
        self._engines = {
            key: engine for key, engine in self._engines.items() if key[0] not in modes
        }

    def _time_limit(self, compiles: bool) -> str:
        """Return why there is no time for another cell, "" if there is."""
        left = self.ends - time.perf_counter()
        needed = 1.5 * self._compiling if compiles else 0.0
        if left > needed:
            return ""
        compiling = f" and compiling takes about {needed:.0f}" if needed else ""
        return f"{max(0.0, left):.0f} s are left (--seconds){compiling}"

    def record_start(self, mode: str, seconds: float) -> None:
        """Record the seconds of the first steps of a cell."""
        if mode == "compile":
            self._compiling = seconds


def _failure_reason(error: Exception, modes: Sequence[str]) -> str:
    """Return the reason of an expected failure; raise any other error."""
    if out_of_memory(error):
        return "memory ended"
    if "compile" in modes and isinstance(error, RuntimeError):  # of torch's compiler
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    raise error


Report = Callable[[Row], None]
Work = Callable[[Probe, Cell, dict[str, CellSession]], dict[str, Row]]


def time_cell(probe: Probe, cell: Cell, sessions: dict[str, CellSession]) -> dict[str, Row]:
    """Return the medians and quartiles of each mode over interleaved rounds."""
    samples: dict[str, list[Row]] = {mode: [] for mode in sessions}
    with_forward = cell.part == "batch" and cell.rows == 16 and cell.distribution == "top-p"
    for repeat in range(probe.repeats + 1):  # the first round captures, or compiles
        for mode in rotated(list(sessions), repeat):
            began = time.perf_counter()
            sample = sessions[mode].sample(probe.steps)
            if with_forward:
                sample["forward_ms"] = sessions[mode].forward(probe.steps)
            if repeat:
                samples[mode].append(sample)
            else:
                probe.record_start(mode, time.perf_counter() - began)
    floor = probe.floor(cell)
    return {mode: _summary(each, floor) for mode, each in samples.items()}


def _summary(samples: Sequence[Row], floor: float) -> Row:
    row = {name: median(sample[name] for sample in samples) for name in samples[0]}
    times = [sample["ms"] for sample in samples]
    low, _, high = quantiles(times, n=4, method="inclusive") if len(times) > 1 else times * 3
    return {**row, "ms_q1": low, "ms_q3": high, "floor_ms": floor, "over_floor": row["ms"] / floor}


def count_cell(probe: Probe, cell: Cell, sessions: dict[str, CellSession]) -> dict[str, Row]:
    """Return the counts of one step in each mode."""
    counts = {}
    for mode, session in sessions.items():
        with session.loop() as loop:
            counts[mode] = count_step(loop.step, probe.device)
    return counts


def time_and_count(probe: Probe, cell: Cell, sessions: dict[str, CellSession]) -> dict[str, Row]:
    """Return times and counts from one compilation."""
    times, counts = time_cell(probe, cell, sessions), count_cell(probe, cell, sessions)
    return {mode: {**times[mode], **counts[mode]} for mode in times}


def measure(
    probe: Probe, parts: Sequence[str], modes: Sequence[str], notify: Report
) -> Iterator[Row]:
    """Yield a row for each cell and mode; call `notify` with each new row."""
    chosen = [cell for cell in probe.cells if cell.part in parts]
    # If memory suffices for one mode, it is not "off".
    plain = sorted((mode for mode in modes if mode != "compile"), key=lambda mode: mode == "off")
    rows = [
        row for cell in chosen for row in _notify_each(probe.rows(cell, plain, time_cell), notify)
    ]
    # The profiler slows later launches down, so all timings come first.
    places = {_key(row): row for row in rows}
    for cell in chosen:
        if all("skipped" in places[_key({**cell.fields, "mode": mode})] for mode in plain):
            continue
        for row in probe.rows(cell, plain, count_cell):
            place = places[_key(row)]
            if "skipped" not in place:
                place["not_counted" if "skipped" in row else "counted"] = row.get("skipped", True)
                place.update({k: v for k, v in row.items() if k not in place and k != "skipped"})
    yield from map(_add_idle_time, rows)
    if "compile" in parts and "compile" in modes:
        for cell in _bars_first(probe.cells):
            compiled = probe.rows(cell, ["compile"], time_and_count)
            yield from map(_add_idle_time, _notify_each(compiled, notify))


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("part", "batch", "length", "rows", "distribution", "mode"))


def _bars_first(every: Sequence[Cell]) -> list[Cell]:
    """Return the cells with those of the bars first, since a compilation takes a minute."""

    def has_bar(cell: Cell) -> bool:
        batch = (cell.rows, cell.distribution, cell.length) == (16, "top-p", every[0].length)
        return (cell.part == "single" and cell.rows != 16) or (cell.part == "batch" and batch)

    return sorted(every, key=lambda cell: not has_bar(cell))


def _notify_each(rows: Iterator[Row], notify: Report) -> Iterator[Row]:
    for row in rows:
        notify(row)
        yield row


def _add_idle_time(row: Row) -> Row:
    """Add the idle time of the device in a step, if it was measured."""
    if row.get("kernels") and "ms" in row:
        row["host_idle_ms"] = max(0.0, row["ms"] - row["busy_ms"])
    return row
