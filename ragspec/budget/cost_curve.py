"""What a forward pass of the target costs on this device, by rows in it and context length.

The curve is measured once for a model, device and dtype (see `cost_measurement`), and learns from
every forward after that. It is the denominator of the budget policy (see `policy`). A curve of
rows against time is what SmartSpec fits with a line (arXiv 2406.14066) and Sequoia with a table
(2402.12374); a table is used here because the steps of real kernels are not lines.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ragspec.errors import InputError
from ragspec.storage import json_cache

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of which costs are measured


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds of a forward by its width.

    seconds: of each of ROWS [12]. widths: those that forwards can have, where not all; others are
    padded to the next. Beyond the last row it goes on with the slope of the last half.
    """

    seconds: Sequence[float]
    widths: Sequence[int] = ()

    def at(self, n: int) -> float:
        """Return the seconds of a forward in which each text has n rows."""
        n = padded(n, self.widths)
        line = self.seconds
        i = bisect_left(ROWS, n)
        if i < len(ROWS):
            if ROWS[i] == n:
                return line[i]
            share = (n - ROWS[i - 1]) / (ROWS[i] - ROWS[i - 1])
            return line[i - 1] + share * (line[i] - line[i - 1])
        half = (len(ROWS) - 1) // 2
        slope = (line[-1] - line[half]) / (ROWS[-1] - ROWS[half])
        return line[-1] + slope * (n - ROWS[-1])


def padded(n: int, widths: Sequence[int]) -> int:
    """Return the least width that holds n; n itself where any can be had, or none is as wide."""
    i = bisect_left(widths, n)
    return widths[i] if i < len(widths) else n


LEVEL_RATE, CLIP = 0.1, 0.45  # weight of a forward in the level, as if at most e^0.45 off
FAR = math.log(2.0)  # three forwards in a row further off than this are believed at once
# How wrong a measured shape may be, as a variance of the logarithm, from each size to the next.
UNSURE = [0.02 * math.log2(more / fewer) for fewer, more in itertools.pairwise(ROWS)]
DRIFT = 0.001  # of it comes back at every pair, for machines change
NOISE, NOISE_RATE = 0.03, 0.05  # variance of the difference of two forwards, until it is known
OUTLIER = 2.5  # standard errors by which a pair counts at most


class CostCurve:
    """Seconds of a target forward, by rows in it (root and nodes) and context length.

    lengths: strictly increasing [C]. seconds: f64 [C, 12], of each of ROWS; made monotone in them.
    Between the points the curve is linear; beyond the last row or length it goes on with the last
    slope, below the first length it is flat. widths: see `CostLine`; where they are given, rows of
    text come in powers of two.

    `refine` learns from forwards: the level, since a busy machine slows everything, and the shape,
    which is how sizes compare, from pairs of forwards one after the other. Of such a pair both ran
    under the same load, so that noise, neighbours and a wrong reading at the start fade from the
    shape, on which all choices of size depend. alive, width: a curve is that of one row alone, see
    `SharedCost`.
    """

    alive = 1
    width = 0

    def __init__(
        self, lengths: Sequence[int], seconds: ArrayLike, widths: Sequence[int] = ()
    ) -> None:
        """Make a curve from measured points.

        Raises InputError where shapes disagree, lengths do not increase or a time is not > 0.
        """
        self.widths = tuple(widths)
        self.lengths = tuple(lengths)
        table = np.asarray(seconds, dtype=np.float64)
        expected = (len(self.lengths), len(ROWS))
        increasing = all(a < b for a, b in itertools.pairwise(self.lengths))
        positive = bool(np.isfinite(table).all() and (table > 0).all())
        if table.shape != expected or not (increasing and positive):
            raise InputError(
                f"a cost curve of shape {table.shape} over lengths {self.lengths} cannot be used: "
                f"expected finite seconds > 0 of shape {expected}, lengths increasing. Measure it "
                "again."
            )
        self.table = [isotonic(row) for row in table.tolist()]
        self.learns_scale = False
        self._lines = self.table  # with the shape [C][12]
        self._shape = [0.0] * len(UNSURE)  # logarithms by which steps to the next size are dearer
        self._unsure = UNSURE.copy()
        self._level = 0.0  # the logarithm of what all is dearer by
        self._noise, self._pairs = NOISE, 0
        self._far: list[float] = []  # errors of the last three forwards
        self._last: tuple[int, float] | None = None  # rows and error of the last, but for the level
        self._batches: dict[int, CostCurve] = {1: self}

    @classmethod
    def assumed(cls) -> CostCurve:
        """Return a curve for when none was measured: a row more costs 2 % of one alone.

        Its scale is taken from the first step that is observed.
        """
        curve = cls((128,), [[0.01 * (1.0 + 0.02 * (n - 1)) for n in ROWS]])
        curve.learns_scale = True
        return curve

    def to_dict(self) -> dict[str, Any]:
        """Return the measured points, without what was learned since, as `CostCurve` takes them."""
        return {"lengths": self.lengths, "seconds": self.table, "widths": self.widths}

    def batched(self, batch: int) -> CostCurve:
        """Return the curve for `batch` equal rows of text in one forward (B x n rows of tokens).

        The seconds are those of the whole forward. At first an estimate (token rows alone count);
        equal calls return the same curve, which `refine` corrects.
        """
        if self.widths:
            batch = 1 << (batch - 1).bit_length()
        known = self._batches.get(batch)
        if known is None:
            wide = [CostLine(row) for row in self.table]
            table = [[line.at(n * batch) for n in ROWS] for line in wide]
            curve = CostCurve(self.lengths, table, self.widths)
            known = self._batches.setdefault(batch, curve)  # texts at once must share one
        return known

    def seconds(self, rows: int, length: int) -> float:
        """Return the seconds of a forward of `rows` rows after `length` tokens of context."""
        return self.line(length).at(rows)

    def line(self, length: int) -> CostLine:
        """Return the seconds of forwards of each width after `length` tokens."""
        return CostLine(self._seconds(length), self.widths)

    def _seconds(self, length: int) -> list[float]:
        level, lines, lengths = math.exp(self._level), self._lines, self.lengths
        if len(lengths) == 1 or length <= lengths[0]:
            return [level * each for each in lines[0]]
        i = min(bisect_left(lengths, length), len(lengths) - 1)
        place = (length - lengths[i - 1]) / (lengths[i] - lengths[i - 1])
        pairs = zip(lines[i - 1], lines[i], strict=True)
        line = [level * (a + (b - a) * place) for a, b in pairs]
        if place > 1.0:  # never cheaper than at the last length
            least = (level * last for last in lines[i])
            line = list(itertools.accumulate(map(max, line, least), max))
        return line

    def refine(self, rows: int, length: int, seconds: float) -> None:
        """Move the curve towards one measured forward.

        The step is clipped, so that outliers count for little; only where several in a row are far
        off is the change of level believed at once.
        """
        if not (seconds > 0.0 and 1 <= rows <= ROWS[-1]):
            return
        error = math.log(seconds / self.seconds(rows, length))
        self._far = [*self._far, error][-3:]
        lasting = len(self._far) == 3 and (min(self._far) > FAR or max(self._far) < -FAR)
        if self.learns_scale or lasting:
            self._level += min(self._far, key=abs)
            self.learns_scale, self._far, self._last = False, [], None
            return
        rows = padded(rows, self.widths)
        before, self._last = self._last, (rows, error + self._level)
        self._level += LEVEL_RATE * min(max(error, -CLIP), CLIP)
        if before is not None and before[0] != rows:
            self._compare(self._last[1] - before[1], _steps(before[0], rows))

    def _compare(self, difference: float, steps: Sequence[float]) -> None:
        """Learn how sizes compare: a Kalman filter over the shape, its covariances left out.

        difference: by how much more the one was dearer than expected. steps: those between them.
        """
        known = sum(s * s * variance for s, variance in zip(steps, self._unsure, strict=True))
        self._pairs += 1
        rate = max(NOISE_RATE, 1.0 / (1 + self._pairs))
        self._noise += rate * (min(max(difference * difference - known, 0.0), 1.0) - self._noise)
        variance = known + self._noise
        most = OUTLIER * math.sqrt(variance)
        for i, step in enumerate(steps):
            gain = step * self._unsure[i] / variance
            self._shape[i] += gain * min(max(difference, -most), most)
            self._unsure[i] += DRIFT * UNSURE[i] - gain * step * self._unsure[i]
        factors = [math.exp(log) for log in itertools.accumulate(self._shape, initial=0.0)]
        self._lines = [  # replaced whole: other threads may be reading
            list(itertools.accumulate(map(mul, line, factors), max)) for line in self.table
        ]


def _steps(fewer: int, more: int) -> list[float]:
    """Return how much of each step from one of ROWS to the next lies between two numbers of rows.

    Negative where `more` is the smaller one.
    """
    return [
        (min(max(more, low), high) - min(max(fewer, low), high)) / (high - low)
        for low, high in itertools.pairwise(ROWS)
    ]


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the nearest non-decreasing sequence (pool adjacent violators): unbiased by noise."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, size = pools.pop()
            mean = (mean * count + before * size) / (count + size)
            count += size
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


@dataclass(slots=True)
class SharedForward:
    """The forward that is being prepared, or was the last; the loop keeps it up to date.

    rows: of text in it. width: positions of each of them, padding counted; 0 before it is known.
    """

    rows: int = 1
    width: int = 0
    _learned: bool = True

    def begin(self, rows: int) -> None:
        """Prepare a forward over so many rows."""
        self.rows = rows

    def widen(self, width: int) -> None:
        """Note how wide it is, once all drafts are known."""
        self.width, self._learned = width, False

    def learned(self) -> bool:
        """Tell whether its time was learned from before: every row of it hears of the same."""
        before, self._learned = self._learned, True
        return before


class SharedCost:
    """A cost curve as the rows of one forward see it: for as many of them as there are now."""

    def __init__(self, curve: CostCurve, forward: SharedForward) -> None:
        self.curve = curve
        self.forward = forward

    @property
    def alive(self) -> int:
        """Rows of text in the forward."""
        return self.forward.rows

    @property
    def width(self) -> int:
        """Positions of each row in the last forward."""
        return self.forward.width

    def line(self, length: int) -> CostLine:
        """Return the seconds of the whole forward by the width of every row."""
        return self.curve.batched(self.alive).line(length)

    def refine(self, rows: int, length: int, seconds: float) -> None:
        """Learn from the last forward, once for all rows; see `CostCurve.refine`."""
        if not self.forward.learned():
            self.curve.batched(self.alive).refine(self.width, length, seconds)


REPEATS = 3  # of each time, within an attempt
ATTEMPTS = 3  # to measure a curve that forwards then agree with
CHECKED = (4, 32)  # rows by which a curve's shape is checked
TOLERANCE = 0.25  # of the logarithm of a cost against that of one row


Timer = Callable[[int, int], float]


def context_lengths(limit: int) -> tuple[int, ...]:
    """Return the lengths to measure for a context of `limit` tokens: short, half, near the end."""
    longest = max(1, limit - ROWS[-1])
    return tuple(sorted({min(128, longest), max(1, longest // 2), longest}))


def measure(
    run: Timer, lengths: Sequence[int], seconds: float = 3.0, widths: Sequence[int] = ()
) -> tuple[CostCurve, bool]:
    """Time `run(rows, length) -> seconds` over the grid, and tell whether forwards then agree.

    Goes round the grid up to REPEATS times, within about `seconds`; one length is always measured
    at three sizes, however slow the model. A curve with which forwards disagree is measured again,
    to the samples that there are. Every size is set against one row timed right before it, for a
    machine that others share may be half as fast a second later; of such ratios medians are taken.
    widths: those that forwards can have, where they are padded; these are timed then.
    """
    order = measuring_order(lengths, widths)
    ratios: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
    alone = dict.fromkeys(lengths, math.inf)
    run(1, order[0][0])  # warms up kernels and allocator; not counted
    for _ in range(ATTEMPTS):
        start = time.perf_counter()
        for point in order * REPEATS:
            length, n = point
            late = time.perf_counter() - start > seconds
            if late and (point in ratios or point not in order[:3]):
                continue
            one = max(run(1, length), 1e-9)
            alone[length] = min(one, alone[length])
            ratios[point].append(1.0 if n == 1 else max(run(n, length), 1e-9) / one)
        known = {point: alone[point[0]] * median(result) for point, result in ratios.items()}
        curve = CostCurve(lengths, filled(known, lengths, order[0][0]), widths)
        if agrees(curve, run):
            return curve, True
    return curve, False


def agrees(curve: CostCurve, run: Timer, quick: bool = False) -> bool:
    """Return whether more rows cost as much more than one as the curve says, by a few forwards.

    Absolute seconds may drift with the clock and the load: `CostCurve.refine` follows those.
    quick: one pair of forwards is compared, each run once.
    """
    length, repeats = curve.lengths[0], 1 if quick else 2
    run(1, length)
    results = [
        min(run(n, length) for _ in range(repeats)) / curve.seconds(n, length)
        for n in (1, *(CHECKED[-1:] if quick else CHECKED))
    ]
    return all(abs(math.log(each / results[0])) < TOLERANCE for each in results)


def cached(
    directory: Path,
    key: json_cache.Key,
    run: Timer,
    lengths: Sequence[int],
    widths: Sequence[int] = (),
) -> CostCurve:
    """Return the curve kept under `directory` for `key`, or measure it and keep it there.

    key: model, device, dtype, threads and torch of the forwards. A damaged, foreign or unwritable
    cache is not an error: the curve is measured again, and so is one of another shape than the
    machine has now. One that forwards do not agree with is used, and corrected while running, but
    not kept. widths: see `measure`.
    """
    key = {**key, "rows": str(ROWS)}  # a kept curve does not say of which rows it is
    if widths:
        key |= {"widths": str(tuple(widths))}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        curve = CostCurve(**(json_cache.read(directory, "cost", key) or {})["curve"])
        # One pair is enough where it agrees: every program begins with this.
        if curve.lengths == tuple(lengths) and (
            agrees(curve, run, quick=True) or agrees(curve, run)
        ):
            return curve
    curve, trusted = measure(run, lengths, widths=widths)
    if trusted:
        json_cache.write(directory, "cost", key, {"curve": curve.to_dict()})
    return curve


def measuring_order(lengths: Sequence[int], widths: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return (length, rows) by importance, each once; rows of `widths` alone where some are given.

    Three sizes at the middle length, then how the other lengths compare, then the rest: a slow
    model, of which only a part can be timed, still gets a curve of about the right shape.
    """
    middle, half = lengths[len(lengths) // 2], ROWS[len(ROWS) // 2]
    others = [length for length in reversed(lengths) if length != middle]
    order = [(middle, n) for n in (1, ROWS[-1], half)]
    order += [(length, n) for n in (1, half) for length in others]
    order += [(length, n) for length in (middle, *others) for n in (*ROWS[::2], *ROWS)]
    return list(dict.fromkeys((length, padded(n, widths)) for length, n in order))


def filled(
    known: Mapping[tuple[int, int], float], lengths: Sequence[int], best: int
) -> NDArray[np.float64]:
    """Return the whole grid from the points (length, rows) that were measured, most at `best`."""
    table = np.empty((len(lengths), len(ROWS)))
    at_best = [n for n in ROWS if (best, n) in known]
    shape = np.interp(ROWS, at_best, [known[best, n] for n in at_best])
    for i, length in enumerate(lengths):
        here = [n for n in ROWS if (length, n) in known]
        ratios = [known[length, n] / float(shape[ROWS.index(n)]) for n in here]
        table[i] = shape * (np.interp(ROWS, here, ratios) if here else 1.0)
    return table
