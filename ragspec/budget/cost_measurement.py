"""Timing the forwards of a target, once for a model, device and dtype, and keeping the curve."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass

from ragspec.budget.cost_grid import MAX_ROWS

Timer = Callable[[int, int], float]


@dataclass(frozen=True, slots=True)
class CostKey:
    """What a measured curve is valid for: weights, device, dtype, threads, torch version."""

    model: str
    device: str
    dtype: str
    threads: int
    torch: str

    @property
    def digest(self) -> str:
        """The name of the cache file: SHA-256 of the fields, 24 hex digits."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:24]


def context_lengths(limit: int) -> tuple[int, ...]:
    """Return the lengths to measure for a context of `limit` tokens: short, half, near the end."""
    longest = max(1, limit - MAX_ROWS)
    return tuple(sorted({min(128, longest), max(1, longest // 2), longest}))
