"""What drafting costs and brings: milliseconds by source and size, tokens by source and outlook.

One `Experience` is shared by all rows of an engine, so that a request starts from what the ones
before it taught. It holds no text. All times are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf, sqrt

from ragspec.budget.calibration import Calibration
from ragspec.budget.cost_curve import ROWS

BUCKETS = tuple(rows - 1 for rows in ROWS)  # nodes of drafts: the sizes that kernels like best
FIRST_TRIAL = BUCKETS.index(7)  # until something is known
# Tokens that each bucket is taken to add over the one before it, until it is known.
EXPECTED = (0.0, 0.6, 0.35, 0.2, 0.2, 0.12, 0.12, 0.06, 0.06, 0.03, 0.03, 0.02)
OUTLIER = 3.0  # times what was expected: a time counts as no more
COST_DECAY = 0.95  # weight of the past at every time of a draft
RIDGE = 0.25  # squares of the mean size: by how much sizes must vary for their own slope to count
RATE = 0.05  # weight of a step in the rate of tokens
KNOWN = 3  # trials after which something is judged
FADING, SIZE_FADING = 0.05, 0.1  # weight of a trial in what was gained, and at what size
DOUBT = 0.5  # standard errors by which a gain may be better than it seems
DUE = 10**9  # refusals after which any trial is due
PAUSE = 2.0  # times as long as a trial's share of the time would have it
OUTLOOKS = (0.1, 0.3, 0.5, 0.7, 0.9)  # chances of the best draft of the next token, told apart


@dataclass(slots=True)
class DraftCost:
    """Milliseconds of a proposal: so many a call and a node asked for, by fading least squares.

    sums: of weight, x, y, x^2, xy. Until sizes have varied, half of the time is taken to go with
    them: what drafts step by step is then tried with few nodes, where its slope is seen.
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
        """Return the milliseconds expected for a call that asks for so many nodes."""
        return self.call + self.node * nodes

    def learn(self, nodes: int, milliseconds: float) -> None:
        """Add one time, clipped at three times what was expected.

        One of less than a third shows that the past was the outlier: it then weighs less. What
        seems dear is hardly asked, so it would be long before a mean came down.
        """
        expected, selected = self.of(nodes), COST_DECAY
        if self.sums[0] > 1.0:
            milliseconds = min(milliseconds, OUTLIER * expected + 0.01)
        if expected > 0.0:
            selected *= min(1.0, OUTLIER * milliseconds / expected)
        new = (1.0, nodes, milliseconds, nodes * nodes, nodes * milliseconds)
        self.sums = [selected * known + added for known, added in zip(self.sums, new, strict=True)]
        self.__post_init__()


@dataclass(slots=True)
class Gain:
    """Tokens that something brings each time, as a fading mean, doubted as far as it varies.

    square: of their squares. trials: how often it was tried; passed: how often it was not since.
    """

    mean: float = 0.0
    square: float = 0.0
    trials: int = 0
    passed: int = field(default=0, init=False)

    @property
    def known(self) -> bool:
        """Whether it was tried often enough to be judged."""
        return self.trials >= KNOWN

    @property
    def doubt(self) -> float:
        """Tokens by which it may well be better than its mean.

        Gains are rare and large: a run of misses would close for long what pays.
        """
        known = min(self.trials, 2.0 / FADING - 1.0)  # what a fading mean rests on
        return DOUBT * sqrt(max(0.0, self.square - self.mean**2) / max(1.0, known))

    def learn(self, tokens: float, price: float = inf, fading: float = FADING) -> None:
        """Add what one trial brought; where that was more than its price, the next is due."""
        self.trials += 1
        self.passed = DUE if tokens > price else self.passed
        weight = max(fading, 1.0 / self.trials)
        self.mean += weight * (tokens - self.mean)
        self.square += weight * (tokens * tokens - self.square)

    def due(self, price: float, share: float) -> bool:
        """Tell whether to try what does not seem to pay: its time may be a share of all.

        price: of a trial, in plain steps.
        """
        self.passed += 1
        if self.passed * share <= PAUSE * price:
            return False
        self.passed = 0
        return True


@dataclass(slots=True)
class SizedGain(Gain):
    """Tokens that drafts bring, less the time of verifying them, by how many nodes are asked for.

    added: tokens of each bucket over the smaller ones, as fading means [12].
    """

    added: list[float] = field(default_factory=lambda: list(EXPECTED))

    def learn_sizes(self, net: list[float], best: int) -> None:
        """Learn what each bucket of one draft brought.

        net: tokens less time of every bucket that was asked for [<= 12]. best: the bucket that was
        chosen. Where the largest was, the next one is worth a try.
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
        """Return the bucket to ask for, and the tokens that it brings beyond those for its time.

        rate: tokens that a millisecond is worth.
        """
        node = cost.node + 0.001  # sorting and cutting cost about a microsecond a node
        total, best, request = -rate * cost.call, -inf, 1
        for i in range(1, largest + 1):
            total += self.added[i] - rate * node * (BUCKETS[i] - BUCKETS[i - 1])
            if total >= best:
                best, request = total, i
        return request, best + self.doubt


@dataclass(slots=True)
class SourceGain:
    """What asking one source costs, and what it adds to those before it, by what they promised."""

    cost: DraftCost = field(default_factory=DraftCost)
    gains: list[Gain] = field(default_factory=lambda: [Gain() for _ in range(len(OUTLOOKS) + 1)])


@dataclass(slots=True)
class Experience:
    """Everything that is learned while running.

    draft: cost of a step's proposal. drafts: what it brings, by outlook; the last where nobody
    tells one. sources: by name. taught: of sources that have to be taught, what they bring less all
    that they cost, in plain steps. steps, tokens, time: of all steps, the latter two as fading
    means of one; host: its time outside drafter and target.
    """

    calibration: Calibration = field(default_factory=Calibration)
    draft: DraftCost = field(default_factory=DraftCost)
    drafts: list[SizedGain] = field(
        default_factory=lambda: [SizedGain() for _ in range(len(OUTLOOKS) + 2)]
    )
    sources: dict[str, SourceGain] = field(default_factory=dict)
    taught: dict[str, Gain] = field(default_factory=dict)
    steps: int = 0
    tokens: float = 0.0
    time: float = 0.0
    host: float = 0.0

    def source(self, name: str) -> SourceGain:
        """Return what is known about a source."""
        # Texts at once must share one, so the first that is set stays.
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
