"""What a forward pass of the target costs on this device, by rows in it and context length.

The curve is measured once for a model, device and dtype, kept on disk, and refined while the
model runs. It is the denominator of the budget policy (see `policy`). A curve of rows against
time is what SmartSpec fits with a line (arXiv 2406.14066) and Sequoia with a table (2402.12374);
a table is used here because the steps of real kernels are not lines.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import numpy as np

from ragspec.budget.cost_grid import (
    MAX_ROWS,
    ROWS,
    Floats,
    agree,
    at,
    filled,
    isotonic,
    measuring_order,
    spread,
)
from ragspec.budget.cost_measurement import CostKey, Timer
from ragspec.errors import InputError

FORMAT = 3


LEVEL_RATE = 0.1


TILT_SHARE = 0.6


CLIP = 0.25  # an observation moves the curve as if it were at most e^0.25 off


MAX_TILT = 1.0


FAR = math.log(2.0)  # three observations further off than this in a row are believed at once


class CostCurve:
    """Seconds of a target forward, by rows in it (root and nodes) and context length.

    rows: strictly increasing, from 1 [R]. lengths: strictly increasing [C]. seconds: f64 [C, R];
    made monotone in the rows. Between the points the curve is linear; beyond the last row or
    length it goes on with the last slope, below the first length it is flat.

    `refine` learns a level and a tilt (against log rows) per length from measured steps: a busy
    machine lifts the level, and a few scalars cannot be left stale at sizes that are not visited.
    """

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], seconds: Floats) -> None:
        """Make a curve from measured points.

        Raises InputError where shapes disagree, the axes do not increase or a time is not > 0.
        """
        self.rows = tuple(int(n) for n in rows)
        self.lengths = tuple(int(length) for length in lengths)
        table = np.asarray(seconds, dtype=np.float64)
        expected = (len(self.lengths), len(self.rows))
        increasing = all(
            a < b for axis in (self.rows, self.lengths) for a, b in itertools.pairwise(axis)
        )
        positive = bool(np.isfinite(table).all() and (table > 0).all())
        if table.shape != expected or self.rows[:1] != (1,) or not increasing or not positive:
            raise InputError(
                f"a cost curve of shape {table.shape} over rows {self.rows} and lengths "
                f"{self.lengths} cannot be used: expected finite seconds > 0 of shape {expected}, "
                "rows increasing from 1 and lengths increasing. Measure it again."
            )
        self.table = np.array([isotonic(row) for row in table])
        self.learns_scale = False
        self._dense = np.array([spread(self.rows, row) for row in self.table])
        self._single = [float(row[0]) for row in self._dense]
        self._lean = np.log2(np.arange(1, MAX_ROWS + 1)) / 4.0  # 0 at one row, 1 at sixteen
        self._level = [0.0] * len(self.lengths)
        self._tilt = [0.0] * len(self.lengths)
        self._far = 0
        self._now: list[Floats | None] = [None] * len(self.lengths)  # None: to be worked out

    @classmethod
    def assumed(cls) -> CostCurve:
        """Return a curve for when none was measured: a row more costs 2 % of one alone.

        Its scale is taken from the first step that is observed.
        """
        curve = cls(ROWS, (128,), np.array([[0.01 * (1.0 + 0.02 * (n - 1)) for n in ROWS]]))
        curve.learns_scale = True
        return curve

    @classmethod
    def measure(
        cls,
        run: Timer,
        lengths: Sequence[int],
        rows: Sequence[int] = ROWS,
        *,
        seconds: float = 3.0,
        repeats: int = 3,
    ) -> CostCurve:
        """Time `run(rows, length) -> seconds` over the grid within about `seconds` in all.

        Goes round the whole grid up to `repeats` times and stops early at points that agree within
        3 %. Every size is set against the smallest one, timed right before it, for a machine that
        others share may be half as fast a second later; of such ratios the medians are taken. What
        time does not allow is filled in from the length and the rows that were measured; one length
        is always measured at three sizes, however slow the model.
        """
        samples: dict[tuple[int, int], list[float]] = {}
        alone: dict[int, float] = {}
        start = time.perf_counter()
        order = measuring_order(tuple(rows), tuple(lengths))
        needed = {(n, length) for length, n in order[:3]}
        run(rows[0], order[0][0])  # warms up kernels and allocator; not counted
        for _ in range(repeats):
            for length, n in order:
                taken = samples.setdefault((n, length), [])
                late = time.perf_counter() - start > seconds
                if (late and not (not taken and (n, length) in needed)) or agree(taken):
                    continue
                one = max(run(rows[0], length), 1e-9)
                alone[length] = min(one, alone.get(length, one))
                taken.append(1.0 if n == rows[0] else max(run(n, length), 1e-9) / one)
        found = ((key, median(taken)) for key, taken in samples.items() if taken)
        known = {(n, length): alone[length] * ratio for (n, length), ratio in found}
        return cls(rows, lengths, filled(known, rows, lengths, order[0][0]))

    @classmethod
    def cached(
        cls,
        directory: Path,
        key: CostKey,
        run: Timer,
        lengths: Sequence[int],
        *,
        seconds: float = 3.0,
    ) -> CostCurve:
        """Return the curve kept under `directory` for `key`, or measure it and keep it there.

        A damaged, foreign or unwritable cache is not an error: the curve is measured again, and
        so is one of another shape than the machine has now (it may stem from a busy moment).
        """
        path = Path(directory) / f"cost-{key.digest}.json"
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            entry = json.loads(path.read_text(encoding="utf-8"))
            curve = cls.from_dict(entry["curve"])
            same = entry["key"] == asdict(key) and curve.lengths == tuple(lengths)
            if same and curve.still_true(run):
                return curve
        curve = cls.measure(run, lengths, seconds=seconds)
        entry = {"key": asdict(key), "curve": curve.to_dict()}
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_text(json.dumps(entry), encoding="utf-8")
            os.replace(part, path)
        return curve

    def still_true(self, run: Timer, tolerance: float = 0.3) -> bool:
        """Return whether 16 rows cost as much more than one as the curve says, by a few forwards.

        Absolute seconds may drift with the clock and the load: `refine` follows those.
        """
        length = self.lengths[0]
        run(1, length)
        one, many = (min(run(n, length) for _ in range(3)) for n in (1, 16))
        known = self.seconds(16, length) / self.seconds(1, length)
        return abs(math.log(many / one / known)) < tolerance

    def to_dict(self) -> dict[str, object]:
        """Return the measured points, without what was learned while running, for JSON."""
        return {
            "format": FORMAT,
            "rows": list(self.rows),
            "lengths": list(self.lengths),
            "seconds": self.table.tolist(),
        }

    @classmethod
    def from_dict(cls, entry: dict[str, object]) -> CostCurve:
        """Return the curve that `to_dict` wrote; raises ValueError or KeyError on anything else."""
        if entry["format"] != FORMAT:
            raise InputError(
                f"got a cost curve of format {entry['format']!r}, expected {FORMAT}. Measure it "
                "again with this version."
            )
        rows, lengths = entry["rows"], entry["lengths"]
        if not isinstance(rows, list) or not isinstance(lengths, list):
            raise InputError("got a cost curve without its axes, expected lists. Measure it again.")
        return cls(rows, lengths, np.asarray(entry["seconds"], dtype=np.float64))

    def settled(self) -> CostCurve:
        """Return a new curve of the present costs, what was learned included."""
        table = np.array([self._line(i) for i in range(len(self.lengths))])[
            :, [min(n, MAX_ROWS) - 1 for n in self.rows]
        ]
        return CostCurve(self.rows, self.lengths, table)

    def batched(self, batch: int) -> CostCurve:
        """Return the curve for `batch` equal rows of text in one forward (B x n rows of tokens).

        The seconds are those of the whole forward. An estimate to start from (token rows alone
        count); `refine` corrects it.
        """
        tables = [[at(self.rows, row, n * batch) for n in self.rows] for row in self.table]
        return CostCurve(self.rows, self.lengths, np.array(tables))

    def seconds(self, rows: int, length: int) -> float:
        """Return the seconds of a forward of `rows` rows after `length` tokens of context."""
        i, place = self._place(length)
        if rows > MAX_ROWS or place > 1.0:
            return at(range(1, MAX_ROWS + 1), self.upto(length), rows)
        low = self._point(i, rows)
        return low if place == 0.0 else low + (self._point(i + 1, rows) - low) * place

    def upto(self, length: int) -> list[float]:
        """Return the seconds of forwards of 1, 2, ... 65 rows after `length` tokens [65]."""
        i, place = self._place(length)
        if place == 0.0:
            return self._line(i).tolist()  # type: ignore[no-any-return]
        low, high = self._line(i), self._line(i + 1)
        if place <= 1.0:
            return (low + (high - low) * place).tolist()  # type: ignore[no-any-return]
        beyond = high + np.maximum(high - low, 0.0) * (place - 1.0)  # never cheaper than there
        return np.maximum.accumulate(beyond).tolist()  # type: ignore[no-any-return]

    def refine(self, rows: int, length: int, seconds: float) -> None:
        """Move the curve towards one measured forward.

        The step is clipped, so that the curve follows the median of a noisy machine and not its
        outliers; only where several in a row are far off is the change believed at once.
        """
        if not (seconds > 0.0 and 1 <= rows <= MAX_ROWS):
            return
        error = math.log(seconds / self.seconds(rows, length))
        lean = float(self._lean[rows - 1])
        self._far = self._far + 1 if abs(error) > FAR else 0
        if self.learns_scale or self._far >= 3:
            self.learns_scale, self._far = False, 0
            for i in range(len(self.lengths)):
                self._move(i, error / (1.0 + lean * lean), lean)
            return
        step = LEVEL_RATE * min(max(error, -CLIP), CLIP) / (1.0 + lean * lean)
        first, place = self._place(length)
        place = min(place, 1.0)
        if place < 1.0:
            self._move(first, (1.0 - place) * step, lean * TILT_SHARE)
        if place > 0.0:
            self._move(first + 1, place * step, lean * TILT_SHARE)

    def _move(self, i: int, level: float, lean: float) -> None:
        """Add to the level and the tilt of one length."""
        self._level[i] += level
        self._tilt[i] = min(max(self._tilt[i] + level * lean, -MAX_TILT), MAX_TILT)
        self._now[i] = None

    def _line(self, i: int) -> Floats:
        """Return the present seconds of 1, 2, ... 65 rows at one length."""
        now = self._now[i]
        if now is None:
            now = np.exp(self._lean * self._tilt[i] + self._level[i]) * self._dense[i]
            now = np.maximum.accumulate(now)
            self._now[i] = now  # replaced whole: other threads may be reading
        return now

    def _point(self, i: int, rows: int) -> float:
        """Return the present seconds of so many rows at one length; of one row, in no time."""
        if rows == 1:
            return self._single[i] * math.exp(self._level[i])
        return float(self._line(i)[rows - 1])

    def _place(self, length: int) -> tuple[int, float]:
        """Return the length's interval and its place in it: 0..1, more beyond the last length."""
        lengths = self.lengths
        if len(lengths) == 1 or length <= lengths[0]:
            return 0, 0.0
        i = 0
        while i < len(lengths) - 2 and length > lengths[i + 1]:
            i += 1
        return i, (length - lengths[i]) / (lengths[i + 1] - lengths[i])
