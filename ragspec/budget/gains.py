"""Cost and gain of drafting: milliseconds by size, tokens by expected acceptance, for each source.

All rows of an engine share one `Experience`, so that a request starts from the
figures of earlier ones. It holds no text. All times are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

from ragspec.budget.calibration import Calibration
from ragspec.budget.cost_curve import ROWS

BUCKETS = tuple(rows - 1 for rows in ROWS)  # nodes of drafts: the sizes that kernels like best
FIRST_TRIAL = BUCKETS.index(7)  # the largest bucket until enough trials were made
# Tokens that each bucket is assumed to add to the one before it, until they are measured.
EXPECTED = (0.0, 0.6, 0.35, 0.2, 0.2, 0.12, 0.12, 0.06, 0.06, 0.03, 0.03, 0.02)
OUTLIER = 3.0  # a time is clipped at so many times the expected one
COST_DECAY = 0.95  # weight of the past at every time of a draft
RIDGE = 0.25  # variance of sizes, in squares of their mean, from which their own slope counts
RATE = 0.05  # weight of a step in the rate of tokens
KNOWN = 3  # trials after which a gain is judged
FADING, SIZE_FADING = 0.05, 0.1  # weight of a trial in the gain, and in the gain by size
STD_ERRS = 0.5  # standard errors by which a gain may exceed its mean
FORCE_TRIAL = 10**9  # a count of skipped trials that makes the next one due
PAUSE = 2.0  # factor on the pause that a trial's share of the time would give
PROB_EDGES = (0.1, 0.3, 0.5, 0.7, 0.9)  # bins of the best draft's acceptance probability


@dataclass(slots=True)
class DraftCost:
    """Milliseconds of a draft, per call and per requested node, by fading least squares.

    Until sizes have varied, half of the time is attributed to the nodes: a drafter that works step
    by step is then tried with few nodes, which shows its slope.

    Attributes:
        sums: Fading sums of 1, x, y, x^2 and xy, of x nodes and y milliseconds.
    """

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    call: float = field(default=0.0, init=False)
    node: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        weight, x, y, xx, xy = self.sums
        if x > 0.0:
            ridge = RIDGE * x * x / weight**2 + 1.0
            node = (xy - x * y / weight + 0.5 * ridge * y / x) / (xx - x * x / weight + ridge)
            self.node = min(max(0.0, node), y / x)
            self.call = max(0.0, y - self.node * x) / weight

    def of(self, nodes: int) -> float:
        """Return the expected milliseconds of a call for so many nodes."""
        return self.call + self.node * nodes

    def learn(self, nodes: int, milliseconds: float) -> None:
        """Add one time, clipped at three times the expected one.

        A time of less than a third shows that the past was the outlier: it then weighs less. An
        expensive source is hardly asked, so its mean would fall too slowly.
        """
        expected, decay = self.of(nodes), COST_DECAY
        if self.sums[0] > 1.0:
            milliseconds = min(milliseconds, OUTLIER * expected + 0.01)
        if expected > 0.0:
            decay *= min(1.0, OUTLIER * milliseconds / expected)
        new = (1.0, nodes, milliseconds, nodes * nodes, nodes * milliseconds)
        self.sums = [decay * past + added for past, added in zip(self.sums, new, strict=True)]
        self.__post_init__()


@dataclass(slots=True)
class Gain:
    """Tokens gained by a trial, as a fading mean with its uncertainty.

    Attributes:
        mean, square: Fading means of the tokens and of their squares.
        trials, passed: Trials in all, and refusals since the last one.
    """

    mean: float = 0.0
    square: float = 0.0
    trials: int = 0
    passed: int = field(default=0, init=False)

    @property
    def known(self) -> bool:
        """Whether there were enough trials to judge it."""
        return self.trials >= KNOWN

    @property
    def std_err(self) -> float:
        """Tokens by which the gain may well exceed its mean.

        Gains are rare and large: a run of misses would close a paying source for long.
        """
        count = min(self.trials, 2.0 / FADING - 1.0)  # the trials that a fading mean rests on
        return STD_ERRS * sqrt(max(0.0, self.square - self.mean**2) / max(1.0, count))

    def learn(self, tokens: float, price: float = inf, fading: float = FADING) -> None:
        """Add the tokens gained by one trial; if they exceed its price, the next trial is due."""
        self.trials += 1
        self.passed = FORCE_TRIAL if tokens > price else self.passed
        weight = max(fading, 1.0 / self.trials)
        self.mean += weight * (tokens - self.mean)
        self.square += weight * (tokens * tokens - self.square)

    def trial_due(self, price: float, share: float) -> bool:
        """Return whether a trial is due although the gain does not seem to pay.

        Args:
            price: Cost of a trial, in plain steps.
            share: Share of all time that trials may take.
        """
        self.passed += 1
        if self.passed * share <= PAUSE * price:
            return False
        self.passed = 0
        return True


@dataclass(slots=True)
class SizedGain(Gain):
    """Tokens gained by drafts, less the time of verifying them, by the number of requested nodes.

    Attributes:
        added: Tokens that each bucket adds to the smaller ones, as fading means [12].
    """

    added: list[float] = field(default_factory=lambda: list(EXPECTED))

    def learn_sizes(self, net: list[float], best: int) -> None:
        """Learn the gain of each bucket of one draft.

        Args:
            net: Tokens less time of every bucket that was requested [<= 12].
            best: The bucket that was chosen; after the largest, the next is worth a try.
        """
        weight = max(SIZE_FADING, 1.0 / (self.trials + KNOWN))
        top = net[0]
        for i in range(1, len(net)):
            self.added[i] += weight * (max(0.0, net[i] - top) - self.added[i])
            top = max(top, net[i])
        last = len(net) - 1
        if 0 < last < len(BUCKETS) - 1 and best == last:
            self.added[last + 1] = max(self.added[last + 1], 0.5 * self.added[last])
        self.learn(top - net[0])

    def best(self, cost: DraftCost, rate: float, largest: int) -> tuple[int, float]:
        """Return the bucket to request, and the tokens that it gains beyond those for its time.

        Args:
            rate: Tokens per millisecond, the price of time.
        """
        node = cost.node + 0.001  # sorting and cutting cost about a microsecond a node
        total, best, request = -rate * cost.call, -inf, 1
        for i in range(1, largest + 1):
            total += self.added[i] - rate * node * (BUCKETS[i] - BUCKETS[i - 1])
            if total >= best:
                best, request = total, i
        return request, best + self.std_err


@dataclass(slots=True)
class SourceGain:
    """The cost of asking one source, and its gain over earlier ones by their best claim."""

    cost: DraftCost = field(default_factory=DraftCost)
    gains: list[Gain] = field(default_factory=lambda: [Gain() for _ in range(len(PROB_EDGES) + 1)])


@dataclass(slots=True)
class Experience:
    """Everything that is learned while running.

    Attributes:
        draft: Cost of a step's draft.
        drafts: Gain of drafts by expected acceptance; the last entry is for an unknown one.
        sources: Cost and gain of each source, by name.
        updates: Gain of each source that learns from every step, less all costs, in plain steps.
        steps, tokens, time: The number of steps, and fading means of one step.
        host: Fading mean of a step's time outside drafter and target.
    """

    calibration: Calibration = field(default_factory=Calibration)
    draft: DraftCost = field(default_factory=DraftCost)
    drafts: list[SizedGain] = field(
        default_factory=lambda: [SizedGain() for _ in range(len(PROB_EDGES) + 2)]
    )
    sources: dict[str, SourceGain] = field(default_factory=dict)
    updates: dict[str, Gain] = field(default_factory=dict)
    steps: int = 0
    tokens: float = 0.0
    time: float = 0.0
    host: float = 0.0

    def source(self, name: str) -> SourceGain:
        """Return the cost and gain of a source."""
        # Concurrent texts must share one, so the first that is set stays.
        return self.sources.get(name) or self.sources.setdefault(name, SourceGain())

    def learn_step(self, tokens: float, milliseconds: float) -> None:
        """Add one step; the first ones weigh as in a plain mean."""
        self.steps += 1
        weight = max(RATE, 1.0 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.time += weight * (milliseconds - self.time)

    def learn_host(self, milliseconds: float) -> None:
        """Add the host time of one step, clipped at three times the mean."""
        usual = self.host or milliseconds
        self.host = usual + 0.1 * (min(milliseconds, OUTLIER * usual) - usual)
