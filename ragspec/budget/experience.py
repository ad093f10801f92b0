"""What a budget policy has learned: acceptance, costs of drafting, rates of token output.

One `Experience` is shared by all rows of an engine, so that a request starts from what the ones
before it taught. It holds no text. All times are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ragspec.budget.calibration import Calibration
from ragspec.budget.gains import (
    BUCKETS,
    FIRST_ASKED,
    OUTLIER,
    DraftCost,
    Rate,
    SourceWorth,
    Upkeep,
    _rate,
)


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
