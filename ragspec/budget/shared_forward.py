"""The forward that the rows of text alive now share, and what it costs.

Rows join and leave, so a policy is not told once how many there are: it asks at every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.cost_line import CostLine


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


class ForwardCost(Protocol):
    """What a policy asks about the forward that its row takes part in."""

    @property
    def alive(self) -> int:
        """Rows of text in the forward."""
        ...

    @property
    def width(self) -> int:
        """Positions of each row in it, where that is known; else 0."""
        ...

    def line(self, length: int) -> CostLine:
        """Return the seconds of the whole forward by the width of every row."""
        ...

    def refine(self, rows: int, length: int, seconds: float) -> None:
        """Learn from the time of the last forward, with so many positions of this row."""
        ...


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
