"""The time of a target forward on this device, by rows in it and context length.

The curve is measured once for a model, device and dtype (see `measure`), and learns from every
forward after that. The budget policy divides by it (see `tree_size`). SmartSpec fits such a curve
with a line (arXiv 2406.14066) and Sequoia with a table (2402.12374); a table is used here because
the steps of real kernels are not linear.
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

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # the numbers of rows that are measured


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds of a forward by its width; beyond ROWS it continues with the slope of the last half.

    Attributes:
        seconds: One entry for each of ROWS [12].
        widths: Widths to which forwards are padded, ascending; empty if any width is possible.
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
    """Return the least of the widths that holds n, or n if none does."""
    i = bisect_left(widths, n)
    return widths[i] if i < len(widths) else n


LEVEL_RATE, CLIP = 0.1, 0.45  # weight of a forward in the level; its error is clipped to e^0.45
FAR = math.log(2.0)  # three forwards in a row with larger errors reset the level
# Variance of the logarithm by which a measured shape may be wrong, from each size to the next.
UNSURE = [0.02 * math.log2(more / fewer) for fewer, more in itertools.pairwise(ROWS)]
DRIFT = 0.001  # share of it that each pair adds again, as machines change
NOISE, NOISE_RATE = 0.03, 0.05  # initial variance of the difference of two forwards, and its rate
OUTLIER = 2.5  # standard errors to which the difference of a pair is clipped


class CostCurve:
    """Seconds of a target forward, by rows in it (root and nodes) and context length.

    The curve is linear between the points and flat below the first length. Beyond the last row or
    length it continues with the last slope.

    `refine` learns the level from forwards, since a busy machine slows everything. It learns the
    shape, which is how sizes compare, from pairs of consecutive forwards: both ran under the same
    load, so noise, neighbours and a wrong first measurement fade from it. All choices of size
    depend on the shape.

    Args:
        lengths: Context lengths, strictly increasing [C].
        seconds: Time of each length and each of ROWS, f64 [C, 12]; made monotone in the rows.
        widths: See `CostLine`; if given, the rows of text in a forward are a power of two.

    Attributes:
        alive, width: Those of a single row, as `SharedCost` has them for several.

    Raises:
        InputError: Shapes disagree, lengths do not increase, or a time is not above 0.
    """

    alive = 1
    width = 0

    def __init__(
        self, lengths: Sequence[int], seconds: ArrayLike, widths: Sequence[int] = ()
    ) -> None:
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
        self._lines = self.table  # corrected by the shape [C][12]
        self._shape = [0.0] * len(UNSURE)  # logarithmic corrections of the steps to the next size
        self._unsure = UNSURE.copy()
        self._level = 0.0  # the logarithmic correction of all times
        self._noise, self._pairs = NOISE, 0
        self._far: list[float] = []  # errors of the last three forwards
        self._last: tuple[int, float] | None = None  # rows and error, less the level, of the last
        self._batches: dict[int, CostCurve] = {1: self}

    @classmethod
    def assumed(cls) -> CostCurve:
        """Return a curve for an unmeasured model: each further row adds 2 % of the first one.

        Its scale is taken from the first forward that is observed.
        """
        curve = cls((128,), [[0.01 * (1.0 + 0.02 * (n - 1)) for n in ROWS]])
        curve.learns_scale = True
        return curve

    def to_dict(self) -> dict[str, Any]:
        """Return the measured points, without later corrections, as arguments of `CostCurve`."""
        return {"lengths": self.lengths, "seconds": self.table, "widths": self.widths}

    def batched(self, batch: int) -> CostCurve:
        """Return the curve for forwards over `batch` equal rows of text (B x n rows of tokens).

        Its seconds are those of the whole forward. It is first estimated from the number of token
        rows. Equal calls return the same curve, which `refine` corrects.
        """
        if self.widths:
            batch = 1 << (batch - 1).bit_length()
        curve = self._batches.get(batch)
        if curve is None:
            lines = [CostLine(row) for row in self.table]
            table = [[line.at(n * batch) for n in ROWS] for line in lines]
            new = CostCurve(self.lengths, table, self.widths)
            curve = self._batches.setdefault(batch, new)  # concurrent texts must share one
        return curve

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

        The move is clipped, so that outliers count for little. Three large errors in a row, of one
        sign, reset the level at once.
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
        """Learn how sizes compare: a Kalman filter over the shape, without covariances.

        `difference` is the error of the second forward less that of the first, and `steps` are the
        steps of size between the two, see `_steps`.
        """
        prior = sum(s * s * variance for s, variance in zip(steps, self._unsure, strict=True))
        self._pairs += 1
        rate = max(NOISE_RATE, 1.0 / (1 + self._pairs))
        self._noise += rate * (min(max(difference * difference - prior, 0.0), 1.0) - self._noise)
        variance = prior + self._noise
        most = OUTLIER * math.sqrt(variance)
        for i, step in enumerate(steps):
            gain = step * self._unsure[i] / variance
            self._shape[i] += gain * min(max(difference, -most), most)
            self._unsure[i] += DRIFT * UNSURE[i] - gain * step * self._unsure[i]
        factors = [math.exp(log) for log in itertools.accumulate(self._shape, initial=0.0)]
        self._lines = [  # replaced as a whole: other threads may be reading it
            list(itertools.accumulate(map(mul, line, factors), max)) for line in self.table
        ]


def _steps(fewer: int, more: int) -> list[float]:
    """Return how much of each step from one of ROWS to the next lies between two numbers of rows.

    The entries are negative if `more` is the smaller number.
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
    """The forward that is being prepared, or the last one; the loop keeps it up to date.

    Attributes:
        rows: Rows of text in it.
        width: Positions of each row, padding included; 0 while unknown.
    """

    rows: int = 1
    width: int = 0
    _learned: bool = True

    def begin(self, rows: int) -> None:
        """Prepare a forward over so many rows."""
        self.rows = rows

    def widen(self, width: int) -> None:
        """Set the width, once all drafts are known."""
        self.width, self._learned = width, False

    def learned(self) -> bool:
        """Return whether a row has reported the forward's time already, and note that one has."""
        before, self._learned = self._learned, True
        return before


class SharedCost:
    """The cost of the forwards that several rows share, for their present number."""

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
        """Return the seconds of the whole forward by the width of its rows."""
        return self.curve.batched(self.alive).line(length)

    def refine(self, rows: int, length: int, seconds: float) -> None:
        """Learn from the last forward, once for all rows; see `CostCurve.refine`."""
        if not self.forward.learned():
            self.curve.batched(self.alive).refine(self.width, length, seconds)


REPEATS = 3  # timings of each point in an attempt
ATTEMPTS = 3  # to measure a curve with which forwards agree
CHECKED = (4, 32)  # numbers of rows that check a curve's shape
TOLERANCE = 0.25  # error of the logarithm of a cost in relation to that of one row

Timer = Callable[[int, int], float]


def context_lengths(limit: int) -> tuple[int, ...]:
    """Return the lengths to measure for a context of `limit` tokens: short, half, near the end."""
    longest = max(1, limit - ROWS[-1])
    return tuple(sorted({min(128, longest), max(1, longest // 2), longest}))


def measure(
    run: Timer, lengths: Sequence[int], seconds: float = 3.0, widths: Sequence[int] = ()
) -> tuple[CostCurve, bool]:
    """Measure a cost curve, and return it and whether forwards then agree with it.

    Each attempt times the grid up to REPEATS times. One length is always timed at three sizes,
    however slow the model. If forwards disagree, another attempt adds to the samples. Every size is
    compared with one row timed right before it, since a shared machine may be half as fast a second
    later; the medians of these ratios count.

    Args:
        run: Runs a forward of `rows` rows after `length` tokens and returns its seconds.
        seconds: Time limit of an attempt, about.
        widths: See `CostLine`; if given, only these are timed.
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
        times = {point: alone[point[0]] * median(each) for point, each in ratios.items()}
        curve = CostCurve(lengths, filled(times, lengths, order[0][0]), widths)
        if agrees(curve, run):
            return curve, True
    return curve, False


def agrees(curve: CostCurve, run: Timer, quick: bool = False) -> bool:
    """Return whether a few forwards confirm the curve's cost of more rows in relation to one.

    Absolute seconds may drift with the clock and the load: `CostCurve.refine` follows those.

    Args:
        quick: Compare one pair of forwards, each run once.
    """
    length, repeats = curve.lengths[0], 1 if quick else 2
    run(1, length)
    ratios = [
        min(run(n, length) for _ in range(repeats)) / curve.seconds(n, length)
        for n in (1, *(CHECKED[-1:] if quick else CHECKED))
    ]
    return all(abs(math.log(each / ratios[0])) < TOLERANCE for each in ratios)


def cached(
    directory: Path,
    key: json_cache.Key,
    run: Timer,
    lengths: Sequence[int],
    widths: Sequence[int] = (),
) -> CostCurve:
    """Return the curve stored under `directory` for `key`; measure and store it if there is none.

    A damaged, foreign or unwritable cache is not an error: the curve is measured again, as is one
    whose shape forwards do not confirm. A new curve with which forwards disagree is used, and
    corrected while running, but not stored.

    Args:
        key: Model, device, dtype, threads and torch of the forwards.
        run, lengths, widths: See `measure`.
    """
    key = {**key, "rows": str(ROWS)}  # a stored curve does not name its rows
    if widths:
        key |= {"widths": str(tuple(widths))}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        curve = CostCurve(**(json_cache.read(directory, "cost", key) or {})["curve"])
        # One pair that agrees is enough: every program begins with this check.
        if curve.lengths == tuple(lengths) and (
            agrees(curve, run, quick=True) or agrees(curve, run)
        ):
            return curve
    curve, trusted = measure(run, lengths, widths=widths)
    if trusted:
        json_cache.write(directory, "cost", key, {"curve": curve.to_dict()})
    return curve


def measuring_order(lengths: Sequence[int], widths: Sequence[int] = ()) -> list[tuple[int, int]]:
    """Return the pairs (length, rows) to time, by importance; rows are padded to `widths`.

    Three sizes at the middle length come first, then a comparison with the other lengths, then the
    rest. A slow model, of which only a part can be timed, thus gets about the right shape.
    """
    middle, half = lengths[len(lengths) // 2], ROWS[len(ROWS) // 2]
    others = [length for length in reversed(lengths) if length != middle]
    order = [(middle, n) for n in (1, ROWS[-1], half)]
    order += [(length, n) for n in (1, half) for length in others]
    order += [(length, n) for length in (middle, *others) for n in (*ROWS[::2], *ROWS)]
    return list(dict.fromkeys((length, padded(n, widths)) for length, n in order))


def filled(
    times: Mapping[tuple[int, int], float], lengths: Sequence[int], best: int
) -> NDArray[np.float64]:
    """Return the whole grid from measured points (length, rows); `best` has most of them."""
    table = np.empty((len(lengths), len(ROWS)))
    at_best = [n for n in ROWS if (best, n) in times]
    shape = np.interp(ROWS, at_best, [times[best, n] for n in at_best])
    for i, length in enumerate(lengths):
        here = [n for n in ROWS if (length, n) in times]
        ratios = [times[length, n] / float(shape[ROWS.index(n)]) for n in here]
        table[i] = shape * (np.interp(ROWS, here, ratios) if here else 1.0)
    return table
