"""The ratio of observed to claimed acceptance, which corrects later claims."""

from dataclasses import dataclass


@dataclass(slots=True)
class Ratio:
    """Decaying counts of claimed acceptance probabilities and of accepted tokens."""

    accepted: float = 0.0
    claimed: float = 0.0

    def learn(self, claim: float, hit: bool, decay: float) -> None:
        """Add one claim, an acceptance probability, and its outcome.

        Args:
            decay: Factor on the earlier counts.
        """
        self.accepted = self.accepted * decay + hit
        self.claimed = self.claimed * decay + claim

    def share(self, prior: float, start: float = 1.0) -> float:
        """Return the factor that corrects a claim; it may exceed 1.

        Args:
            prior: Sum of claims assumed before the first observation.
            start: The share of `prior` that is assumed accepted.
        """
        return (prior * start + self.accepted) / (prior + self.claimed)
