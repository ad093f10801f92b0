"""What a benchmark measured, prompt by prompt."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from ragspec.pipelines.bench.modes import Outcome


@dataclass(slots=True)
class Measured:
    """All runs of one item in one mode: the output, and seconds of every repetition."""

    outcome: Outcome
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    @property
    def decode_seconds(self) -> float:
        """Median of the whole runs less median of the runs stopped at the first token."""
        return max(1e-9, median(self.seconds) - median(self.prefill))
