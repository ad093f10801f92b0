"""The time of a target forward by its positions and the context length, learned while running.

Forwards of several sequences are packed without padding, so the positions of all of them count
together. A short probe gives the first curve, and every forward corrects it. SmartSpec fits a line
(arXiv 2406.14066), Sequoia a table (2402.12374).
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import numpy as np

from ragspec.errors import InputError

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)  # positions, between which costs are linear
PRIOR_SLOPE = 0.02  # cost of a further position if none was timed, in forwards of one position
SHORT, LONG = 128, 4096  # context lengths of the probe; shorter for a shorter context window
PROBE_SECONDS = 0.5  # time limit of a round of the probe, about
ROUNDS = 2  # of timed forwards, as another process may slow some of them
PROBED = (  # positions and context of the probe's forwards, by importance
    *((1, SHORT), (16, SHORT), (4, SHORT), (16, LONG), (1, LONG)),
    *((64, SHORT), (2, SHORT), (32, SHORT), (8, SHORT)),
)
RECENT = 9  # forwards whose median error is the level of all costs
PAIR_RATE = 0.1  # share of an error between two sizes that is corrected at once
PAIR_CLIP = 0.5  # the largest such error that counts, as a logarithm

Timer = Callable[[int, int], float]
"""Runs a forward of some positions after some tokens of context, and returns its seconds."""


class ForwardCost:
    """Seconds of a forward by its positions and the tokens of context before them.

    The level is the median error of recent forwards. The shape, which is how sizes compare, is
    learned from consecutive forwards of different sizes, as both ran under the same load.

    Args:
        seconds: Timed forwards after a short context, by positions; by default a line, whose scale
            is that of the first forward.
        growth: Seconds that a token of context adds to a forward, and to each of its positions.
        widths: Positions to which each sequence is padded, ascending; the number of sequences is
            then a power of two. Empty if forwards are packed.

    Attributes:
        timings: The measured seconds by `SIZES`, and the growth, without what was learned since.
        learned: The positions of each sequence in the last forward whose time is known.

    Raises:
        InputError: A time is not above 0, or there is none of one position.
    """

    def __init__(
        self,
        seconds: Mapping[int, float] | None = None,
        growth: tuple[float, float] = (0.0, 0.0),
        widths: Sequence[int] = (),
    ) -> None:
        timed = dict(sorted((seconds or {1: 1.0}).items()))
        if 1 not in timed or not all(0.0 < each < math.inf for each in timed.values()):
            raise InputError(
                f"got seconds {timed}; expected finite ones above 0, and that of one position."
            )
        if len(timed) == 1:
            timed[SIZES[-1]] = timed[1] * (1.0 + PRIOR_SLOPE * (SIZES[-1] - 1))
        self.widths = tuple(widths)
        self.timings = _over_sizes(timed), growth
        self._curve = self.timings[0]
        self._steps = [0.0] * (len(SIZES) - 1)  # logarithmic corrections from each size to the next
        self._scale = 1.0  # the factor of the level
        # A timed curve is right until most of the recent forwards disagree.
        self._errors: deque[float] = deque([0.0] * (RECENT // 2 if seconds else 0), RECENT)
        self._last: tuple[int, float] | None = None  # positions and error of the last forward
        self.learned: Sequence[int] = ()

    @classmethod
    def probe(
        cls, run: Timer, limit: int | None = None, widths: Sequence[int] = (), rounds: int = ROUNDS
    ) -> "ForwardCost":
        """Return the cost by a few timed forwards; of a slow model those of the first two sizes.

        Args:
            limit: The longest context, None for no limit.
            widths: See `ForwardCost`.
            rounds: How often each is timed, of which the least counts.
        """
        longest = max(1, min(LONG, limit or LONG) - SIZES[-1])
        short = min(SHORT, longest)
        times: dict[tuple[int, int], float] = {}
        began = time.perf_counter()
        run(1, short)  # warms up kernels and allocator; not counted
        for size, length in rounds * PROBED:
            if len(times) >= 2 and time.perf_counter() - began > rounds * PROBE_SECONDS:
                break
            point = padded(size, widths), short if length == SHORT else longest
            times[point] = min(times.get(point, math.inf), max(run(*point), 1e-9))
        timed = {n: seconds for (n, length), seconds in times.items() if length == short}
        many, span = padded(16, widths), longest - short
        if not span or not {(1, longest), (many, longest)} <= times.keys():
            return cls(timed, widths=widths)
        one, more = ((times[n, longest] - timed[n]) / span for n in (1, many))
        each = max(0.0, more - one) / (many - 1)
        return cls(timed, (max(0.0, one - each), each), widths)

    def positions(self, counts: Sequence[int]) -> int:
        """Return the positions of a forward, given those of each of its sequences."""
        if not self.widths:
            return sum(counts)
        return (1 << (len(counts) - 1).bit_length()) * padded(max(counts), self.widths)

    def seconds(self, positions: int, length: int) -> float:
        """Return the expected seconds of a forward after `length` tokens of context."""
        i = min(bisect_left(SIZES, positions), len(SIZES) - 1)
        seconds = self._curve[i]
        if SIZES[i] != positions:
            # Beyond the last size the slope is that of the last half.
            before = i - 1 if positions < SIZES[i] else (i - 1) // 2
            slope = (seconds - self._curve[before]) / (SIZES[i] - SIZES[before])
            seconds += slope * (positions - SIZES[i])
        whole, each = self.timings[1]
        return self._scale * (seconds + (whole + each * positions) * max(0, length - SHORT))

    def learn(self, positions: int, length: int, seconds: float) -> None:
        """Learn from a forward that took so many seconds."""
        if not 0.0 < seconds < math.inf:
            return
        error = math.log(self._scale * seconds / self.seconds(positions, length))
        self._errors.append(error)
        self._scale = math.exp(sorted(self._errors)[(len(self._errors) - 1) // 2])
        before, self._last = self._last, (positions, error)
        if before is not None and before[0] != positions:
            difference = min(max(error - before[1], -PAIR_CLIP), PAIR_CLIP)
            self._compare(before[0], positions, PAIR_RATE * difference)

    def _compare(self, fewer: int, more: int, change: float) -> None:
        """Change the logarithm of the cost of `more` positions over that of `fewer`."""
        low, high = sorted((fewer, more))
        crossed = [max(0, min(high, b) - max(low, a)) / (b - a) for a, b in pairwise(SIZES)]
        if total := sum(crossed):
            each = (change if more > fewer else -change) / total
            self._steps = [old + each * x for old, x in zip(self._steps, crossed, strict=True)]
            logs = accumulate(self._steps, initial=0.0)
            learned = (t * math.exp(log) for t, log in zip(self.timings[0], logs, strict=True))
            self._curve = [*accumulate(learned, max)]


def padded(positions: int, widths: Sequence[int]) -> int:
    """Return the least of the widths that holds the positions; the positions if none does."""
    i = bisect_left(widths, positions)
    return widths[i] if i < len(widths) else positions


def _over_sizes(timed: Mapping[int, float]) -> list[float]:
    """Return the seconds of SIZES by lines through the timed ones.

    None is above those of more positions: what else ran may have slowed it, but never sped it up.
    """
    sizes, seconds = list(timed), np.minimum.accumulate([*timed.values()][::-1])[::-1]
    slope = (seconds[-1] - seconds[0]) / (sizes[-1] - sizes[0])
    beyond = np.maximum(0, np.asarray(SIZES) - sizes[-1]) * slope
    return [*map(float, np.interp(SIZES, sizes, seconds) + beyond)]
