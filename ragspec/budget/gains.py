"""Cost and gain of drafting, for each source and each expected acceptance.

All sequences of an engine share one `Experience`, so that a request starts from the figures of
earlier ones. It holds no text. All times are in milliseconds.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf, sqrt

from ragspec.budget.calibration import Kind
from ragspec.budget.forward_cost import SIZES

BUCKETS = tuple(size - 1 for size in SIZES)  # nodes of drafts: the sizes whose costs are known
FIRST_BUCKET = BUCKETS.index(7)  # of the first draft
ROOM = 2  # buckets beyond the used nodes that are requested
SHRINK = 0.05  # share of further ones by which the next request is smaller
OUTLIER = 3.0  # a time is clipped at so many times the expected one
FADING = 0.05  # weight of a trial in its mean, and of a step in the rate of tokens
TRIALS = 3  # after so many a gain is judged
STD_ERRS = 0.5  # standard errors by which a gain may exceed its mean
PAUSE = 250.0  # plain steps between trials that do not seem to pay, for the time of one trial
PROB_EDGES = (0.1, 0.3, 0.5, 0.7, 0.9)  # bins of the best draft's acceptance probability


@dataclass(slots=True)
class Gain:
    """Tokens gained by trials, as a fading mean with its uncertainty, and the time of a trial.

    Attributes:
        mean, square: Fading means of the tokens and of their squares.
        cost: Fading mean of the milliseconds of a trial.
        size: Nodes to request, as an index into BUCKETS.
        trials: Trials in all.
        passed: Refusals since the last trial; infinite if the next trial is due at once.
    """

    mean: float = 0.0
    square: float = 0.0
    cost: float = 0.0
    size: float = FIRST_BUCKET
    trials: int = 0
    passed: float = 0

    def allows(self, rate: float, plain: float) -> bool:
        """Return whether a trial pays, or is due although it does not seem to pay.

        Args:
            rate: Tokens per millisecond, the price of time.
            plain: Milliseconds of a plain step.
        """
        # Gains are rare and large: a run of misses would close a paying source for long.
        count = min(self.trials, 2.0 / FADING - 1.0)  # the trials that a fading mean rests on
        std_err = sqrt(max(0.0, self.square - self.mean**2) / max(1.0, count))
        if self.trials < TRIALS or self.mean + STD_ERRS * std_err > rate * self.cost:
            return True
        self.passed += 1
        if self.passed * plain <= PAUSE * self.cost:
            return False
        self.passed = 0
        return True

    def learn(self, tokens: float) -> None:
        """Add the tokens gained by one trial."""
        self.trials += 1
        weight = max(FADING, 1.0 / self.trials)
        self.mean += weight * (tokens - self.mean)
        self.square += weight * (tokens * tokens - self.square)

    def learn_outcome(self, tokens: float, rate: float) -> None:
        """Make the next trial due at once if one trial gained more than its time is worth."""
        if tokens > rate * self.cost:
            self.passed = inf

    def learn_cost(self, milliseconds: float) -> None:
        """Add the time of one trial."""
        self.cost = faded(self.cost, milliseconds)

    def learn_size(self, requested: int, used: int) -> None:
        """Learn how many of the requested nodes were worth verifying, both as buckets."""
        if used >= requested:
            self.size = max(self.size, requested + ROOM)
        else:
            self.size += SHRINK * (used + ROOM - self.size)


def faded(mean: float, milliseconds: float) -> float:
    """Return a fading mean with one more time, which is clipped at three times the mean.

    A time of less than a third shows that the past was the outlier, and takes its place.
    """
    if not mean or OUTLIER * milliseconds < mean:
        return milliseconds
    return mean + FADING * (min(milliseconds, OUTLIER * mean) - mean)


@dataclass(slots=True)
class Experience:
    """Everything that is learned while running.

    Attributes:
        claims: Shifts of claims by kind, see `calibration`.
        gains: Those of sources by name and expected acceptance, and of whole drafts, named "".
        steps, tokens, time: The number of steps, and fading means of one step.
        host: Fading mean of a step's time outside drafter and target.
    """

    claims: dict[Kind, float] = field(default_factory=dict)
    gains: dict[tuple[str, int], Gain] = field(default_factory=dict)
    steps: int = 0
    tokens: float = 0.0
    time: float = 0.0
    host: float = 0.0

    def gain(self, source: str, expected: float | None) -> Gain:
        """Return the gain of a source, or of drafts, at an expected acceptance."""
        key = source, -1 if expected is None else bisect_right(PROB_EDGES, expected)
        # Concurrent texts must share one, so the first that is set stays.
        return self.gains.get(key) or self.gains.setdefault(key, Gain())

    def learn_step(self, tokens: float, milliseconds: float) -> None:
        """Add one step; the first ones weigh as in a plain mean."""
        self.steps += 1
        weight = max(FADING, 1.0 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.time += weight * (milliseconds - self.time)

    def rate(self, plain: float) -> float:
        """Return the tokens per millisecond, at least those of plain steps."""
        return max(self.tokens / self.time if self.time > 0.0 else 0.0, 1.0 / plain)
