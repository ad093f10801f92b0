"""How many strides to write on guesses before they are checked, and whether while they are.

OS3, the optimal speculation stride of RaLMSpec (Zhang et al. 2024, arXiv 2401.14021, section 4):
with a milliseconds for a stride, b(s) for checking s of them at once and g the chance of a guess,
a round of s strides is expected to keep (1 - g^s) / (1 - g) of them in s * a + b(s), or, where the
next stride is written while the search runs, in less by what the two share. Where we deviate:
- b grows with the batch as it was seen to, and is not one number: an approximate or sparse index
  takes s times as long for s queries, so that nothing is won by asking them together.
- g is the mean of a Beta posterior that fades; the paper cuts it at 0.6, which forbids what pays
  most where a search takes many strides. The best s is looked up among all up to 16.
- There are two guesses, the best known answer by the measure of the search, and the present one
  once more; whichever was right more often lately is written on.
- Of the shorter of both times only the share that was seen to be hidden counts: on a machine of few
  cores search and model slow each other.
- The gate: where less than 5 % are to be had, every stride is checked before the next one.
"""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Self

from ragspec.errors import InputError

MOST = 16  # strides of a round
LEAST_GAIN = 1.05  # over checking each stride, else it is not worth the risk
RECENT = 9  # times of which the median counts
FADING = 0.97  # weight of the past at every guess
PRIOR_HITS, PRIOR = 3.0, 4.0  # right ones of the guesses that stand for what is not known yet
SHARED = 0.7  # of the shorter time is taken to be hidden, until it is seen; 0 on a single core
SHARED_RATE = 0.2
GLANCE = 8  # rounds in a row without speculation after which a guess is compared all the same
ALONE = 10  # of so many rounds one is not overlapped


@dataclass(frozen=True, slots=True)
class StridePlan:
    """What the next round does: so many strides, and whether the next is begun meanwhile.

    guesses: whether the answer after the last one is guessed, too, if only to learn how often a
    guess is right.
    """

    strides: int = 1
    overlapped: bool = False
    guesses: bool = True


@dataclass(slots=True)
class SearchCost:
    """Milliseconds of a search by the number of queries: medians of what was measured.

    further: what each further query of a batch adds, as a share of a single one, until a batch of
    that size was seen; then the nearest one counts.
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
        near = queries
        if near not in self.medians:
            near = min(self.medians, key=lambda known: (abs(known - queries), known))
        return self.medians[near] * self._weight(queries) / self._weight(near)

    def _weight(self, queries: int) -> float:
        return 1.0 + self.further * (queries - 1)

    def to_dict(self) -> dict[int, float]:
        """Return the medians that were measured, by the number of queries."""
        return dict(sorted(self.medians.items()))


@dataclass(slots=True)
class StrideSchedule:
    """Chooses the strides of each round, and learns from it. One for all requests of a pipeline.

    fixed: the strides of every round, None to choose. overlap: None for where it pays. shared:
    of the shorter of a stride and a search, the part that an overlap hides. hits, guesses,
    searched, stayed: fading counts of guesses, and of what either kind had right. since_alone:
    rounds since one was not overlapped; gated: rounds in a row that were not worth a guess. most:
    strides of a round, as many as a search takes at once.
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
        """Return the schedule of a user's word: "auto", "off", or the strides of every round.

        Raises InputError for anything else.
        """
        if speculate == "off":
            return cls(fixed=1, overlap=False)
        if speculate == "auto":
            return cls(overlap=overlap)
        whole = isinstance(speculate, int) and not isinstance(speculate, bool)
        if whole and 1 <= int(speculate) <= MOST:
            return cls(fixed=int(speculate), overlap=overlap)
        raise InputError(
            f"speculate is {speculate!r}; expected 'auto', 'off', or strides from 1 to {MOST}."
        )

    @property
    def chance(self) -> float:
        """The chance of a guess: the mean of its posterior, 0.75 before anything was seen."""
        return (self.hits + PRIOR_HITS) / (self.guesses + PRIOR)

    @property
    def stays(self) -> bool:
        """Whether the present answer has been the better guess than the best known one."""
        return self.stayed > self.searched

    def learn_rivals(self, searched: bool, stayed: bool) -> None:
        """Count which of the two guesses would have been right."""
        self.searched = self.searched * FADING + searched
        self.stayed = self.stayed * FADING + stayed

    @property
    def stride_ms(self) -> float:
        """Milliseconds of a stride; 0 before the first."""
        return median(self.strides) if self.strides else 0.0

    @property
    def known(self) -> bool:
        """Whether strides and searches have been timed."""
        return bool(self.strides and self.search.times)

    def rate(self, plan: StridePlan) -> float:
        """Return the strides that a round is expected to keep in a millisecond."""
        b = self.search.of(plan.strides)
        shared = self.shared if plan.overlapped else 0.0
        selected, spent = expected(plan.strides, self.chance, self.stride_ms, b, shared)
        return selected / max(spent, 1e-9)

    def gain(self, plan: StridePlan) -> float:
        """Return by what factor a plan is expected to be faster than checking each stride."""
        return self.rate(plan) / self.rate(StridePlan())

    def next(self) -> StridePlan:
        """Return the plan of most strides a millisecond; one stride where little is to be had."""
        if self.fixed is not None:
            overlapped = bool(self.overlap)
            return StridePlan(self.fixed, overlapped, guesses=self.fixed > 1 or overlapped)
        if not self.known:
            return StridePlan()
        best = self._best()
        if self.gain(best) < LEAST_GAIN:
            self.gated += 1
            return StridePlan(guesses=self.gated % GLANCE == 0)
        self.gated = 0
        # Only alone is it seen what strides and searches take: once before all, and now and then.
        self.since_alone = self.since_alone + 1 if best.overlapped else 0
        timed = best.strides in self.search.times
        if (timed and self.since_alone < ALONE) or self.overlap:
            return best
        self.since_alone = 0
        return replace(best, overlapped=False)

    def _best(self) -> StridePlan:
        """Return the plan of the highest rate; of equal ones the smallest."""
        choices = (False, True) if self.overlap is None else (self.overlap,)
        plans = [StridePlan(n, each) for each in choices for n in range(1, self.most + 1)]
        return max(plans, key=self.rate)

    def learn_guesses(self, right: int, wrong: bool) -> None:
        """Count the guesses of a round up to the first wrong one."""
        for hit in [1.0] * right + [0.0] * wrong:
            self.hits = self.hits * FADING + hit
            self.guesses = self.guesses * FADING + 1.0

    def learn_overlap(self, stride: float, search: float, both: float) -> None:
        """Learn what share of the shorter time was hidden; all in milliseconds.

        stride, search: what they take alone. both: what they took together.
        """
        shorter = min(stride, search)
        if shorter > 0.0:
            share = min(max((stride + search - both) / shorter, 0.0), 1.0)
            self.shared += SHARED_RATE * (share - self.shared)


def expected(strides: int, chance: float, a: float, b: float, shared: float) -> tuple[float, float]:
    """Return the strides that a round of s is expected to keep, and its milliseconds.

    a: of a stride; b: of the search for all. shared: of the shorter of both, the part that an
    overlap hides.
    """
    whole = chance**strides
    selected = (1.0 - whole) / (1.0 - chance)
    return selected, strides * a + b - whole * shared * min(a, b)
