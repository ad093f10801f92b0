"""Buffers that outlive a session, and the steps that were created over them."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from ragspec.sampling.batch_distribution import BatchDistribution
from ragspec.verification.static.buffers import Stacks
from ragspec.verification.static.layout import MOST_QUERIES
from ragspec.verification.static.step import FixedStep, RequestDistributions


@dataclass(slots=True, eq=False)
class Arena:
    """The buffers of one session at a time, and the steps that were created over them."""

    stacks: Stacks
    steps: dict[Hashable, FixedStep] = field(default_factory=dict)
    # By the number of rows of a step.
    distributions: dict[int, RequestDistributions] = field(default_factory=dict)
    addresses: int = 0

    def moved(self) -> None:
        """Discard the steps of buffers whose addresses have changed."""
        self.steps.clear()
        self.distributions.clear()

    def distributions_of(self, rows: int, vocab_size: int) -> RequestDistributions:
        """Return the distributions of the first rows of the buffers."""
        if rows not in self.distributions:
            distributions = BatchDistribution(
                rows, vocab_size, self.stacks.device, self.stacks.slots + MOST_QUERIES
            )
            self.distributions[rows] = RequestDistributions(distributions, rows)
        return self.distributions[rows]
