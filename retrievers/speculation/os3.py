"""The schedule of speculative retrieval: strides per check, and whether writing overlaps it.

OS3, the optimal speculation stride of RaLMSpec (Zhang et al. 2024, arXiv 2401.14021, section 4).
With a milliseconds for a stride, b(s) for a check of s strides and g the probability that a guess
is right, a round of s strides is expected to keep (1 - g^s) / (1 - g) of them in s * a + b(s). If
the next stride is written during the search, the time that both share is saved. Deviations:
- b is measured by the size of the batch instead of one number. An approximate or sparse index takes
  s times as long for s queries, so batching them saves nothing.
- g is the mean of a Beta posterior that fades. The paper caps it at 0.6, which rules out the best
  strides if a search takes as long as many of them. The best s is looked up among 1 to 16.
- There are two guesses: the best known answer by the scores of the search, and the present answer
  again. The one that was right more often lately is used.
- Only the measured share of the shorter time counts as hidden by an overlap: with few cores, search
  and model slow each other down.
- If the expected gain is below 5 %, every stride is checked before the next one.
"""

import os
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Self

from ragspec.errors import InputError
from ragspec.reports.report import Retrieval
from ragspec.sampling.settings import whole

MOST = 16  # strides of a round
LEAST_GAIN = 1.05  # over checking each stride; a smaller gain does not justify speculation
RECENT = 9  # times whose median counts
FADING = 0.97  # weight of the past at every guess
PRIOR_HITS, PRIOR = 3.0, 4.0  # right guesses and all guesses assumed before any is observed
SHARED = 0.7  # share of the shorter time assumed hidden until it is measured; 0 on a single core
SHARED_RATE = 0.2
GLANCE = 8  # rounds in a row without speculation after which one guess is compared anyway
ALONE = 10  # one in so many rounds is not overlapped


@dataclass(frozen=True, slots=True)
class StridePlan:
    """The plan of the next round.

    Attributes:
        strides: Strides to write before their check.
        overlapped: Whether the next stride is written during the check.
        guesses: Whether the answer after the last stride is guessed too, if only to learn how often
            a guess is right.
    """

    strides: int = 1
    overlapped: bool = False
    guesses: bool = True


@dataclass(slots=True)
class SearchCost:
    """Milliseconds of a search by the number of queries, as medians of recent times.

    Attributes:
        further: Cost of each further query of a batch, relative to a single one. It scales the
            nearest measured size if a size was not measured.
        times, medians: By the number of queries.
    """

    further: float = 0.5
    times: dict[int, deque[float]] = field(default_factory=dict)
    medians: dict[int, float] = field(default_factory=dict)

    def learn(self, queries: int, milliseconds: float) -> None:
        """Add the time of one search."""
        times = self.times.setdefault(queries, deque(maxlen=RECENT))
        times.append(milliseconds)
        self.medians[queries] = median(times)

    def of(self, queries: int) -> float:
        """Return the milliseconds expected for so many queries at once; 0 before any."""
        if not self.medians:
            return 0.0
        near = min(self.medians, key=lambda size: (abs(size - queries), size))
        more = self.further
        return self.medians[near] * (1.0 + more * (queries - 1)) / (1.0 + more * (near - 1))


@dataclass(slots=True)
class StrideSchedule:
    """Chooses the strides of each round and learns from it, for all requests of a pipeline.

    Attributes:
        fixed: Strides of every round, None to choose them.
        overlap: Whether rounds overlap their checks, None to choose.
        strides: Recent milliseconds of a stride.
        shared: Share of the shorter of stride and search that an overlap hides.
        hits, guesses: Fading counts of right guesses and of all.
        searched, stayed: Fading counts of right guesses by the search and by the present answer.
        since_alone: Rounds since one was not overlapped.
        gated: Rounds in a row that did not pay a guess.
        most: Most strides of a round: the queries that a search takes at once.
    """

    fixed: int | None = None
    overlap: bool | None = None
    search: SearchCost = field(default_factory=SearchCost)
    strides: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    shared: float = field(default_factory=lambda: SHARED if (os.cpu_count() or 1) > 1 else 0.0)
    hits: float = 0.0
    guesses: float = 0.0
    searched: float = 0.0
    stayed: float = 0.0
    since_alone: int = 0
    gated: int = 0
    most: int = MOST

    @classmethod
    def named(cls, speculate: str | int, overlap: bool | None = None) -> Self:
        """Return the schedule of a user's setting.

        Args:
            speculate: "auto", "off", or the strides of every round.

        Raises:
            InputError: `speculate` is something else.
        """
        if speculate == "off":
            return cls(fixed=1, overlap=False)
        if speculate == "auto":
            return cls(overlap=overlap)
        if 1 <= (strides := whole(speculate) or 0) <= MOST:
            return cls(fixed=strides, overlap=overlap)
        raise InputError(
            f"speculate is {speculate!r}; expected 'auto', 'off', or a number from 1 to {MOST}."
        )

    @property
    def chance(self) -> float:
        """Probability that a guess is right: the mean of its posterior, 0.75 at first."""
        return (self.hits + PRIOR_HITS) / (self.guesses + PRIOR)

    def learn_rivals(self, searched: bool, stayed: bool) -> None:
        """Count which of the two guesses would have been right."""
        self.searched = self.searched * FADING + searched
        self.stayed = self.stayed * FADING + stayed

    @property
    def stride_ms(self) -> float:
        """Milliseconds of a stride, 0 before the first."""
        return median(self.strides) if self.strides else 0.0

    def report(self, retrieval: Retrieval, strides: int) -> None:
        """Record the strides of a text, and what was measured so far."""
        retrieval.strides, retrieval.search_ms = strides, dict(sorted(self.search.medians.items()))
        retrieval.stride_ms, retrieval.chance = self.stride_ms, self.chance

    def rate(self, plan: StridePlan) -> float:
        """Return the strides that a round is expected to keep per millisecond."""
        a, b = self.stride_ms, self.search.of(plan.strides)
        shared = self.shared if plan.overlapped else 0.0
        right = self.chance**plan.strides  # probability that all guesses are right
        strides = (1.0 - right) / (1.0 - self.chance)
        return strides / max(plan.strides * a + b - right * shared * min(a, b), 1e-9)

    def next(self) -> StridePlan:
        """Return the plan of the highest rate, one stride if the gain is too small."""
        if self.fixed is not None:
            overlapped = bool(self.overlap)
            return StridePlan(self.fixed, overlapped, guesses=self.fixed > 1 or overlapped)
        if not (self.strides and self.search.times):  # nothing is timed yet
            return StridePlan()
        choices = (False, True) if self.overlap is None else (self.overlap,)
        plans = [StridePlan(n, each) for each in choices for n in range(1, self.most + 1)]
        best = max(plans, key=self.rate)  # of equal rates the smallest plan
        if self.rate(best) / self.rate(StridePlan()) < LEAST_GAIN:
            self.gated += 1
            return StridePlan(guesses=self.gated % GLANCE == 0)
        self.gated = 0
        # Without an overlap, strides and searches are timed: once at first, then now and then.
        self.since_alone = self.since_alone + 1 if best.overlapped else 0
        if (best.strides in self.search.times and self.since_alone < ALONE) or self.overlap:
            return best
        self.since_alone = 0
        return replace(best, overlapped=False)

    def learn_guesses(self, right: int, wrong: bool) -> None:
        """Count the guesses of a round up to the first wrong one."""
        for hit in [1.0] * right + [0.0] * wrong:
            self.hits = self.hits * FADING + hit
            self.guesses = self.guesses * FADING + 1.0

    def learn_overlap(self, stride: float, search: float, both: float) -> None:
        """Learn the share of the shorter time that an overlap hid.

        Args:
            stride, search: Milliseconds of each alone.
            both: Milliseconds of both together.
        """
        if (shorter := min(stride, search)) > 0.0:
            share = min(max((stride + search - both) / shorter, 0.0), 1.0)
            self.shared += SHARED_RATE * (share - self.shared)
