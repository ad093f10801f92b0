"""What a budget policy has learned: acceptance, costs of drafting, what drafts and sources bring.

One `Experience` is shared by all rows of an engine, so that a request starts from what the ones
before it taught. It holds no text. All times are in milliseconds.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ragspec.budget.calibration import Calibration
from ragspec.budget.gains import OUTLIER, DraftCost, Gain, SizedGain

OUTLOOKS = (0.1, 0.3, 0.5, 0.7, 0.9)  # chances of the best draft of the next token, told apart


@dataclass(slots=True)
class Source:
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
    sources: dict[str, Source] = field(default_factory=dict)
    taught: dict[str, Gain] = field(default_factory=dict)
    steps: int = 0
    tokens: float = 0.0
    time: float = 0.0
    host: float = 0.0

    def __post_init__(self) -> None:
        gains = {len(source.gains) + 1 for source in self.sources.values()} | {len(self.drafts)}
        if gains != {len(OUTLOOKS) + 2}:
            raise ValueError(f"gains at {gains} outlooks, expected {len(OUTLOOKS) + 2}")

    def source(self, name: str) -> Source:
        """Return what is known about a source."""
        found = self.sources.get(name)
        if found is None:  # texts at once must share one, so the first that is set stays
            found = self.sources.setdefault(name, Source())
        return found

    def learn_step(self, tokens: float, milliseconds: float, weight: float) -> None:
        """Add one step; the first ones weigh as in a plain mean."""
        self.steps += 1
        weight = max(weight, 1.0 / self.steps)
        self.tokens += weight * (tokens - self.tokens)
        self.time += weight * (milliseconds - self.time)

    def learn_host(self, milliseconds: float) -> None:
        """Add the host time of one step, clipped at three times the mean."""
        if self.host == 0.0:
            self.host = milliseconds
        self.host += 0.1 * (min(milliseconds, OUTLIER * self.host) - self.host)
