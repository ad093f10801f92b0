"""Simulated machines for budget.py: true costs, disturbances, and curves that were read wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ragspec.budget.cost_curve import CostCurve
from ragspec.pipelines.bench.clock import Disturbance

PLAIN = 0.005  # seconds of a forward of one row, where the scenario does not say
HOST = 0.0002
ROWS = (1, 2, 4, 8, 13, 16, 24, 32, 64)


def curve(seconds: Sequence[float], rows: Sequence[int] = ROWS) -> CostCurve:
    """Return a curve that does not depend on the length."""
    return CostCurve(rows, (128,), np.array([seconds]))


# A small model on one thread; a device on which rows are nearly free; a kernel for single rows
# beside one for several; and a 135 M Llama on one thread, as measured.
RISING = curve([PLAIN * (1.0 + 0.045 * (n - 1)) for n in ROWS])
FLAT = curve([PLAIN * (1.0 + 0.002 * (n - 1)) for n in ROWS])
STEP = curve([PLAIN * (1.0 if n == 1 else 1.36 + 0.012 * n) for n in ROWS])
LONG = CostCurve(
    (1, 8, 16, 32),
    (512, 2048, 4096, 7500),
    np.array(
        [
            [0.069, 0.078, 0.101, 0.157],
            [0.076, 0.100, 0.147, 0.232],
            [0.090, 0.136, 0.207, 0.330],
            [0.120, 0.182, 0.287, 0.478],
        ]
    ),
)


def read_flat(truth: CostCurve) -> CostCurve:
    """Return what a busy moment made of a curve: 19 ms for one row, 26 for 4 to 32 alike."""
    table = [[row[0] * (1.0 if n == 1 else 26 / 19) for n in truth.rows] for row in truth.table]
    return CostCurve(truth.rows, truth.lengths, np.array(table))


def read_steep(truth: CostCurve) -> CostCurve:
    """Return a curve on which further rows seem three times as dear, and by 10 % of one besides."""
    alone = truth.table[:, :1]
    table = alone + 3.0 * (truth.table - alone) + 0.1 * alone * (np.array(truth.rows) > 1)
    return CostCurve(truth.rows, truth.lengths, table)


@dataclass(frozen=True, slots=True)
class Setting:
    """A machine's disturbances, and what it made of the true curve at start-up; None measures."""

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
