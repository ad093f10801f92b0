"""Whether a source that has to be taught is worth it.

Most sources cost nothing while nobody asks them. One that learns from every step of the target
(Token Recycling) takes time at each of them, beside a draft model for tokens that the model knew
too. What it brings is therefore weighed against all that it takes, and where that is more it rests
for whole texts, save for a few that show whether this is still so.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import Any

ENOUGH = 96  # steps before a source is judged
TRIED = 8  # of the texts for which it would rest, one in so many tries it all the same
FADING = 1.0 / 384.0  # weight of a step


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
        self.brought *= 1.0 - FADING
        self.spent *= 1.0 - FADING

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
