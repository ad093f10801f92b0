"""What sources brought and took: tokens that a draft added, milliseconds that it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite, sqrt
from typing import Any

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


def _rate(entry: object) -> Rate:
    if not isinstance(entry, list):
        raise TypeError("rate")
    tokens, milliseconds, steps = entry
    return Rate(float(tokens), float(milliseconds), int(steps))


ENOUGH = 96  # steps before a source is judged


TRIED = 8  # of the texts for which it would rest, one in so many tries it all the same


SLOW_FADING = 1.0 / 384.0  # weight of a step


@dataclass(slots=True)
class Upkeep:
    """The accounts of one source in tokens, over the last steps of the texts that it worked for.

    brought: how much further the text followed the drafts with it than without, less the price of
    its nodes. spent: what the time was worth in which it drafted and was taught.
    rested: texts for which it was left alone since the last one that tried it.
    """

    brought: float = 0.0
    spent: float = 0.0
    steps: int = 0
    rested: int = 0

    def step(self) -> None:
        """Close a step: the past weighs less from now on."""
        self.steps += 1
        self.brought *= 1.0 - SLOW_FADING
        self.spent *= 1.0 - SLOW_FADING

    def rests(self, tries: bool) -> bool:
        """Tell whether to leave the source alone for a text. tries: whether some texts try it."""
        if self.steps < ENOUGH or self.brought >= self.spent:
            return False
        self.rested = (self.rested + 1) % TRIED if tries else self.rested
        return not tries or self.rested > 0

    def to_dict(self) -> dict[str, object]:
        """Return the accounts, for JSON."""
        return {"brought": self.brought, "spent": self.spent, "steps": self.steps}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Upkeep:
        """Return what `to_dict` wrote; ValueError, KeyError or TypeError on anything else."""
        new = cls(float(entry["brought"]), float(entry["spent"]), int(entry["steps"]))
        if not (isfinite(new.brought) and isfinite(new.spent) and new.steps >= 0):
            raise ValueError(f"accounts {entry} of a source")
        return new
