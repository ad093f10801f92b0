"""How far claims of acceptance are to be believed, by how claims of their kind fared."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Ratio:
    """What was accepted of what was claimed, as counts that fade."""

    accepted: float = 0.0
    claimed: float = 0.0

    def learn(self, claim: float, hit: bool, decay: float) -> None:
        """Add one claim (1: a certain one) and its outcome; decay: weight of what was before."""
        self.accepted = self.accepted * decay + hit
        self.claimed = self.claimed * decay + claim

    def share(self, prior: float, start: float = 1.0) -> float:
        """Return what part of a claim to believe; may exceed 1.

        prior: how much is taken to have been claimed before anything was seen, and `start` what
        part of that was accepted.
        """
        return (prior * start + self.accepted) / (prior + self.claimed)
