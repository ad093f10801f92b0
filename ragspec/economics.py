"""What a budget policy has learned: acceptance, costs of drafting, rates of token output.

One `Experience` is shared by all rows of an engine, so that a request starts from what the ones
before it taught. It holds no text. All times are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

from ragspec.calibration import Calibration
from ragspec.upkeep import Upkeep

BUCKETS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FIRST_ASKED = BUCKETS.index(8)
OUTLIER = 3.0
RIDGE = 0.25  # squares of the mean size: by how much sizes must vary for a slope to be seen
FREE = 0.01  # what costs less of a plain step than this is always asked
CHEAP = 0.1  # what costs more is asked for few nodes at a time
MOST_VAIN = 2
FADING = 0.05  # weight of a trial in what a source brings
DOUBT = 0.5  # standard errors by which a source may be better than it seems
LEVELS = (0.1, 0.3, 0.5, 0.7, 0.9)  # of the best claim for the next token, before a source speaks


@dataclass(slots=True)
class DraftCost:
    """Milliseconds of a proposal as a line in the nodes asked for; fading least squares.

    sums: of weight, x, y, x^2, xy. A slope is only seen once sizes vary by much; until then a
    ridge keeps it at 0, so larger drafts are tried and it is seen.
    """

    sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    decay: float = 0.95
    _line: tuple[float, float] | None = field(default=None, init=False, repr=False, compare=False)

    def learn(self, nodes: int, milliseconds: float) -> None:
        """Add one measurement, clipped at three times what was expected.

        One of less than a third shows that the past was the outlier: it then weighs less. What
        seems dear is hardly asked, so it would be long before a mean came down.
        """
        weight, x, y, xx, xy = self.sums
        kept, n = self.decay, float(nodes)
        if weight > 0.0:
            expected = self.of(nodes)
            if weight > 1.0:
                milliseconds = min(milliseconds, OUTLIER * expected + 0.01)
            kept *= min(1.0, OUTLIER * milliseconds / max(expected, 1e-9))
        self.sums = [
            weight * kept + 1.0,
            x * kept + n,
            y * kept + milliseconds,
            xx * kept + n * n,
            xy * kept + n * milliseconds,
        ]
        self._line = None

    def line(self) -> tuple[float, float]:
        """Return (milliseconds per call, milliseconds per node), both >= 0."""
        if self._line is None:
            self._line = self._fitted()
        return self._line

    def _fitted(self) -> tuple[float, float]:
        weight, x, y, xx, xy = self.sums
        if weight <= 0.0:
            return 0.0, 0.0
        mean = x / weight
        spread = xx - x * mean + RIDGE * mean * mean + 1.0
        slope = max(0.0, (xy - x * y / weight) / spread)
        slope = min(slope, y / x) if x > 0.0 else 0.0
        return max(0.0, (y - slope * x) / weight), slope

    @classmethod
    def from_list(cls, entry: Any) -> DraftCost:
        """Return the cost of such sums; ValueError or TypeError for what no times add up to."""
        sums = [float(value) for value in entry]
        weight, x, _, xx, _ = sums
        # The spread of the sizes is never negative, save for rounding.
        spread = xx * weight - x * x * (1.0 - 1e-9)
        if not all(map(isfinite, sums)) or min(weight, x, xx, spread) < 0.0:
            raise ValueError(f"sums {sums} of a cost")
        return cls(sums)

    def of(self, nodes: int) -> float:
        """Return the milliseconds expected for a call that asks for so many nodes."""
        call, node = self.line()
        return call + node * nodes


@dataclass(slots=True)
class SourceWorth:
    """What asking one source costs, and what it brought by the level of promise before it.

    gains, squares: tokens, and their squares, as fading means; trials: how often the source was
    asked at that level; passed: how often it was not since; vain: how often in a row it then
    brought nothing.
    """

    cost: DraftCost = field(default_factory=DraftCost)
    gains: list[float] = field(default_factory=lambda: [0.0] * (len(LEVELS) + 1))
    squares: list[float] = field(default_factory=lambda: [0.0] * (len(LEVELS) + 1))
    trials: list[int] = field(default_factory=lambda: [0] * (len(LEVELS) + 1))
    passed: list[int] = field(default_factory=lambda: [0] * (len(LEVELS) + 1))
    vain: list[int] = field(default_factory=lambda: [0] * (len(LEVELS) + 1))
    _hopes: list[float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._hopes = [self._hope(level) for level in range(len(LEVELS) + 1)]

    def learn(self, level: int, gain: float) -> None:
        """Add the tokens that the source brought in one step."""
        self.trials[level] += 1
        vain = gain <= 0.0 and not self.unknown(level)
        self.vain[level] = min(self.vain[level] + 1, MOST_VAIN) if vain else 0
        weight = max(FADING, 1.0 / self.trials[level])
        self.gains[level] += weight * (gain - self.gains[level])
        self.squares[level] += weight * (gain * gain - self.squares[level])
        self._hopes[level] = self._hope(level)

    def unknown(self, level: int) -> bool:
        """Whether too little is known of the source at a level of promise to judge it."""
        return self.trials[level] < 3

    def hoped(self, level: int) -> float:
        """Return the tokens that the source may well bring: more than the mean, if that is unsure.

        Gains are rare and large: a run of misses would close a source for long that pays.
        """
        return self._hopes[level]

    def _hope(self, level: int) -> float:
        seen = min(self.trials[level], 2.0 / FADING - 1.0)  # what a fading mean rests on
        variance = self.squares[level] - self.gains[level] ** 2
        return self.gains[level] + DOUBT * sqrt(max(0.0, variance) / max(1.0, seen))

    def pays(self, level: int, price: float, pause: float, probes: bool, steps: int = 1) -> bool:
        """Tell whether to ask at a price in tokens, or else for once after `pause` refusals.

        Pauses double while such trials are in vain, up to four times as long. steps: as how many
        refusals this one would count.
        """
        if self.hoped(level) > price:
            return True
        self.passed[level] += steps
        if not probes or self.passed[level] <= pause * 2 ** self.vain[level]:
            return False
        self.passed[level] = 0
        return True

    def to_dict(self) -> dict[str, object]:
        """Return everything that was learned, for JSON."""
        return {
            "cost": self.cost.sums,
            "gains": self.gains,
            "squares": self.squares,
            "trials": self.trials,
        }

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> SourceWorth:
        """Return what `to_dict` wrote; ValueError, KeyError or TypeError on anything else."""
        cost = DraftCost.from_list(entry["cost"])
        gains, squares = ([float(value) for value in entry[key]] for key in ("gains", "squares"))
        trials = [int(value) for value in entry["trials"]]
        if not len(gains) == len(squares) == len(trials) == len(LEVELS) + 1:
            raise ValueError("gains and trials of a source")
        return cls(cost, gains, squares, trials)


@dataclass(slots=True)
class Rate:
    """Tokens and milliseconds per step, as fading means."""

    tokens: float = 0.0
    milliseconds: float = 0.0
    steps: int = 0

    def learn(self, tokens: float, milliseconds: float, weight: float) -> None:
        """Add one step; the first steps weigh as in a plain mean."""
        self.steps += 1
        weight = max(weight, 1.0 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.milliseconds += weight * (milliseconds - self.milliseconds)

    @property
    def value(self) -> float:
        """Tokens per millisecond; 0 before the first step."""
        return self.tokens / self.milliseconds if self.milliseconds > 0.0 else 0.0


@dataclass(slots=True)
class Experience:
    """Everything that is learned while running.

    host: milliseconds of a step outside drafter and target. overall: tokens and time of all
    steps. drafted: expected tokens and time of the steps in which the drafter was asked.
    worth: net tokens that a bucket added over the ones below it. asked: index of the bucket that
    the drafter is asked for. credit: plain steps whose time the probes of all rows may still cost.
    draft: cost of a step's proposal; sources: of each of its sources. asking: what drafting
    brought by the outlook. upkeep: accounts of the sources that have to be taught.
    """

    calibration: Calibration = field(default_factory=Calibration)
    draft: DraftCost = field(default_factory=DraftCost)
    sources: dict[str, SourceWorth] = field(default_factory=dict)
    asking: SourceWorth = field(default_factory=SourceWorth)
    upkeep: dict[str, Upkeep] = field(default_factory=dict)
    overall: Rate = field(default_factory=Rate)
    drafted: Rate = field(default_factory=Rate)
    host: float = 0.0
    worth: list[float] = field(default_factory=lambda: [0.5] * len(BUCKETS))
    asked: int = FIRST_ASKED
    credit: float = 1.0

    def source(self, name: str) -> SourceWorth:
        """Return what is known about a source."""
        found = self.sources.get(name)
        if found is None:  # texts at once must share one, so the first that is set stays
            found = self.sources.setdefault(name, SourceWorth())
        return found

    def earn(self, steps: float, price: float) -> None:
        """Add to the credit for probes, or take from it; price: more than one is not saved up."""
        self.credit = min(self.credit + steps, max(1.0, price))

    def learn_host(self, milliseconds: float) -> None:
        """Add the host time of one step, clipped at three times the mean."""
        if self.host == 0.0:
            self.host = milliseconds
        self.host += 0.1 * (min(milliseconds, OUTLIER * self.host) - self.host)

    def learn_worth(self, net: list[float], best: int) -> None:
        """Learn what each bucket added, and choose how much to ask for next.

        net: tokens less time (at the current rate) of every bucket that was asked for [<= 13].
        best: the bucket that was chosen. Where the largest was, the next one is worth a try.
        """
        top = net[0]
        for i in range(1, len(net)):
            added = max(0.0, net[i] - top)
            top = max(top, net[i])
            self.worth[i] += 0.1 * (added - self.worth[i])
        last = len(net) - 1
        if 0 < last < len(BUCKETS) - 1 and best == last:
            self.worth[last + 1] = max(self.worth[last + 1], 0.5 * self.worth[last])

    def choose_asked(self, rate: float, largest: int) -> None:
        """Set `asked` to the bucket whose drafting pays best at `rate` tokens a millisecond."""
        node = self.draft.line()[1] + 0.001  # sorting and cutting cost about a microsecond a node
        total, best, asked = 0.0, 0.0, 1
        for i in range(1, min(self.asked + 1, largest) + 1):
            total += self.worth[i] - rate * node * (BUCKETS[i] - BUCKETS[i - 1])
            if total >= best:
                best, asked = total, i
        self.asked = asked

    def to_dict(self) -> dict[str, object]:
        """Return everything that was learned, for JSON."""
        return {
            "calibration": self.calibration.to_dict(),
            "draft": self.draft.sums,
            "sources": {name: worth.to_dict() for name, worth in list(self.sources.items())},
            "asking": self.asking.to_dict(),
            "upkeep": {name: books.to_dict() for name, books in list(self.upkeep.items())},
            "overall": [self.overall.tokens, self.overall.milliseconds, self.overall.steps],
            "drafted": [self.drafted.tokens, self.drafted.milliseconds, self.drafted.steps],
            "host": self.host,
            "worth": self.worth,
            "asked": self.asked,
        }

    @classmethod
    def from_dict(cls, entry: dict[str, object]) -> Experience:
        """Return what `to_dict` wrote; ValueError, KeyError or TypeError on anything else."""
        fields: dict[str, object] = dict(entry)
        calibration = fields["calibration"]
        sums, worth = fields["draft"], fields["worth"]
        if not isinstance(calibration, dict):
            raise TypeError("calibration")
        if not (isinstance(worth, list) and len(worth) == len(BUCKETS)):
            raise ValueError("worth")
        return cls(
            calibration=Calibration.from_dict(calibration),
            draft=DraftCost.from_list(sums),
            sources={
                str(name): SourceWorth.from_dict(worth)
                for name, worth in fields["sources"].items()  # type: ignore[attr-defined]
            },
            asking=SourceWorth.from_dict(fields["asking"]),  # type: ignore[arg-type]
            upkeep={
                str(name): Upkeep.from_dict(books)
                for name, books in fields["upkeep"].items()  # type: ignore[attr-defined]
            },
            overall=_rate(fields["overall"]),
            drafted=_rate(fields["drafted"]),
            host=float(fields["host"]),  # type: ignore[arg-type]
            worth=[float(value) for value in worth],
            asked=min(max(int(fields["asked"]), 1), len(BUCKETS) - 1),  # type: ignore[call-overload]
        )


def _rate(entry: object) -> Rate:
    if not isinstance(entry, list):
        raise TypeError("rate")
    tokens, milliseconds, steps = entry
    return Rate(float(tokens), float(milliseconds), int(steps))
