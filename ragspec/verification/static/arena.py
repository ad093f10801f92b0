"""What lasts longer than a session: its buffers, and the steps that were made over them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.verification.static.buffers import Stacks
from ragspec.verification.static.layout import MOST_QUERIES
from ragspec.verification.static.step import FixedStep, RequestDistributions


@dataclass(slots=True, eq=False)
class Arena:
    """The buffers of one session at a time, and the steps that were made over them."""

    stacks: Stacks
    steps: dict[Hashable, FixedStep] = field(default_factory=dict)
    distributions: dict[int, RequestDistributions] = field(
        default_factory=dict
    )  # by rows of a step
    addresses: int = 0

    def moved(self) -> None:
        """Forget what was made for buffers that are elsewhere now."""
        self.steps.clear()
        self.distributions.clear()

    def distributions_of(self, rows: int, vocab_size: int) -> RequestDistributions:
        """Return the distributions of the first rows of the buffers."""
        result = self.distributions.get(rows)
        if result is None:
            distributions = BatchDistribution(
                rows, vocab_size, self.stacks.device, self.stacks.slots + MOST_QUERIES
            )
            result = self.distributions[rows] = RequestDistributions(distributions, rows)
        return result
