"""What forwards of every width cost, after one length of context.

Widths are positions of each row of text: the root and its nodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # of which costs are measured
BEYOND = (128, 256, 512, 1024)  # rows of many texts together, where these are measured too


@dataclass(frozen=True, slots=True)
class CostLine:
    """Seconds of a forward by its width.

    seconds: of each of ROWS [12]. widths: those that forwards can have, where not all; others are
    padded to the next. beyond: for BEYOND, by how much they cost more than 64; () where unknown.
    """

    seconds: Sequence[float]
    widths: Sequence[int] = ()
    beyond: Sequence[float] = ()

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
        return self._beyond(n)

    def _beyond(self, n: int) -> float:
        """Go on as was measured, after that or without it with the last slope."""
        last = self.seconds[-1]
        if not self.beyond:
            half = (len(ROWS) - 1) // 2
            slope = (last - self.seconds[half]) / (ROWS[-1] - ROWS[half])
            return last + slope * (n - ROWS[-1])
        sizes, factors = (ROWS[-1], *BEYOND), (1.0, *self.beyond)
        i = min(bisect_left(sizes, n), len(BEYOND))
        share = (n - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
        return last * (factors[i - 1] + share * (factors[i] - factors[i - 1]))


def padded(n: int, widths: Sequence[int]) -> int:
    """Return the least width that holds n; n itself where any can be had, or none is as wide."""
    i = bisect_left(widths, n)
    return widths[i] if i < len(widths) else n
