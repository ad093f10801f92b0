"""Timing the forwards of a target, once for a model, device and dtype, and keeping the curve."""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ragspec.budget.cost_curve import BEYOND, ROWS, CostCurve, padded
from ragspec.storage import json_cache

REPEATS = 3  # of each time, within an attempt
ATTEMPTS = 3  # to measure a curve that forwards then agree with
CHECKED = (4, 32)  # rows by which a curve's shape is checked
TOLERANCE = 0.25  # of the logarithm of a cost against that of one row
TEXTS = 16  # texts at once, by which more rows than one text has are timed


Timer = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class Padding:
    """What forwards are padded to: their widths, strictly increasing, and rows by powers of two.

    run: times a forward of n rows in each of some texts: run(n, length, texts) -> seconds.
    """

    widths: Sequence[int]
    run: Callable[[int, int, int], float]

    def wide(self, length: int) -> list[float]:
        """Return by how much more than the most rows of one text those of BEYOND cost."""
        one = min(self.run(ROWS[-1], length, 1) for _ in range(REPEATS))
        return [
            min(self.run(rows // TEXTS, length, TEXTS) for _ in range(REPEATS)) / one
            for rows in BEYOND
        ]


def context_lengths(limit: int) -> tuple[int, ...]:
    """Return the lengths to measure for a context of `limit` tokens: short, half, near the end."""
    longest = max(1, limit - ROWS[-1])
    return tuple(sorted({min(128, longest), max(1, longest // 2), longest}))


def measure(
    run: Timer, lengths: Sequence[int], seconds: float = 3.0, padding: Padding | None = None
) -> tuple[CostCurve, bool]:
    """Time `run(rows, length) -> seconds` over the grid, and tell whether forwards then agree.

    Goes round the grid up to REPEATS times, within about `seconds`; one length is always measured
    at three sizes, however slow the model. A curve with which forwards disagree is measured again,
    to the samples that there are. Every size is set against one row timed right before it, for a
    machine that others share may be half as fast a second later; of such ratios medians are taken.
    padding: where forwards are padded, widths that they can have are timed, and many texts too.
    """
    widths = padding.widths if padding else ()
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
        beyond = padding.wide(lengths[0]) if padding else ()
        curve = CostCurve(lengths, filled(known, lengths, order[0][0]), widths, beyond)
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
    padding: Padding | None = None,
) -> CostCurve:
    """Return the curve kept under `directory` for `key`, or measure it and keep it there.

    key: model, device, dtype, threads and torch of the forwards. A damaged, foreign or unwritable
    cache is not an error: the curve is measured again, and so is one of another shape than the
    machine has now. One that forwards do not agree with is used, and corrected while running, but
    not kept. padding: see `measure`.
    """
    key = {**key, "rows": str(ROWS)}  # a kept curve does not say of which rows it is
    if padding is not None:
        key |= {"widths": str(tuple(padding.widths)), "texts": TEXTS}
    with contextlib.suppress(ValueError, KeyError, TypeError):
        curve = CostCurve(**(json_cache.read(directory, "cost", key) or {})["curve"])
        # One pair is enough where it agrees: every program begins with this.
        if curve.lengths == tuple(lengths) and (
            agrees(curve, run, quick=True) or agrees(curve, run)
        ):
            return curve
    curve, trusted = measure(run, lengths, padding=padding)
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
