"""Simulated machines of budget.py: true costs, disturbances, and wrongly measured curves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from harness.clock import Disturbance

from ragspec.budget.cost_curve import ROWS, CostCurve

PLAIN = 0.005  # default seconds of a forward of one row
HOST = 0.0002


def curve(seconds: Sequence[float]) -> CostCurve:
    """Return a curve that is independent of the length."""
    return CostCurve((128,), [seconds])


# A small model on one thread; a device on which rows are nearly free; separate kernels for single
# and several rows; and a 135 M Llama on one thread, as measured (64 rows are extrapolated).
RISING = curve([PLAIN * (1.0 + 0.045 * (n - 1)) for n in ROWS])
FLAT = curve([PLAIN * (1.0 + 0.002 * (n - 1)) for n in ROWS])
STEP = curve([PLAIN * (1.0 if n == 1 else 1.36 + 0.012 * n) for n in ROWS])
LONG_ROWS = (1, 8, 16, 32, 64)
LONG = CostCurve(
    (512, 2048, 4096, 7500),
    [
        np.interp(ROWS, LONG_ROWS, seconds)
        for seconds in (
            (0.069, 0.078, 0.101, 0.157, 0.262333),
            (0.076, 0.100, 0.147, 0.232, 0.408),
            (0.090, 0.136, 0.207, 0.330, 0.588667),
            (0.120, 0.182, 0.287, 0.478, 0.872667),
        )
    ],
)


def misread(truth: CostCurve, read: Callable[[float, float, int], float]) -> CostCurve:
    """Return a curve whose measured points become `read(of one row, of n rows, n)`."""
    measured = LONG_ROWS if truth is LONG else ROWS
    places = [(n, ROWS.index(n)) for n in measured]
    table = [[read(row[0], row[i], n) for n, i in places] for row in truth.table]
    return CostCurve(truth.lengths, [np.interp(ROWS, measured, row) for row in table])


def read_flat(truth: CostCurve) -> CostCurve:
    """Return a curve as measured in a busy moment: 19 ms for one row, 26 for several."""
    return misread(truth, lambda one, _, n: one * (1.0 if n == 1 else 26 / 19))


def read_steep(truth: CostCurve) -> CostCurve:
    """Return a curve on which further rows cost three times as much plus 10 % of one row."""
    return misread(truth, lambda one, more, n: one + 3.0 * (more - one) + 0.1 * one * (n > 1))


@dataclass(frozen=True, slots=True)
class Setting:
    """The disturbances of a machine, and its error at start-up; None measures the curve."""

    disturbance: Disturbance = field(default_factory=Disturbance)
    belief: Callable[[CostCurve], CostCurve] | None = None


MACHINES = {
    "quiet": Setting(),
    "noise-25": Setting(Disturbance(noise=0.25)),
    "noise-50": Setting(Disturbance(noise=0.5)),
    "outliers": Setting(Disturbance(outliers=0.02)),
    "steal": Setting(Disturbance(steal=0.5)),
    "slices": Setting(Disturbance(slice=0.004)),
    "read-flat": Setting(Disturbance(noise=0.05), read_flat),
    "read-steep": Setting(Disturbance(noise=0.05), read_steep),
    "worst": Setting(Disturbance(0.5, 0.02, 0.5), read_flat),
}
