"""What speculative retrieval did for one text: searches, guesses, and what they cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that was done.

    what: "write" (a stride), "guess", "search", or "ahead" (a stride written during a search).
    start: milliseconds since the text began. queries: of a search. kept: whether a stride stayed
    in the text.
    """

    what: str
    start: float
    milliseconds: float
    queries: int = 1
    kept: bool = True


@dataclass(slots=True)
class Retrieval:
    """Searches of one text.

    calls: of the search; queries: in them. rounds: checks. strides: of the text. hits: guesses that
    were right; rollbacks: rounds that ended at a wrong one. wasted: strides that were taken back.
    stride_ms (a), search_ms (b, by queries at once): medians of recent times. chance: of a guess.
    predicted: by what factor these rounds are faster than a search before every stride, by the
    formula over these costs. gated: rounds in which every stride was checked before the next.
    events: what was done when.
    """

    calls: int = 0
    queries: int = 0
    rounds: int = 0
    strides: int = 0
    hits: int = 0
    rollbacks: int = 0
    wasted: int = 0
    stride_ms: float = 0.0
    search_ms: dict[int, float] = field(default_factory=dict)
    chance: float = 0.0
    predicted: float = 1.0
    gated: int = 0
    events: list[Event] = field(default_factory=list)

    def summary(self) -> str:
        """Return one sentence for people."""
        guessed = self.hits + self.rollbacks
        right = f", {self.hits} of {guessed} guesses right" if guessed else ""
        back = f", {self.wasted} taken back" if self.wasted else ""
        return (
            f"Looked up {self.queries} times in {self.calls} searches over {self.strides} strides"
            f"{right}{back}."
        )

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        facts = asdict(self)
        facts["search_ms"] = {str(count): ms for count, ms in self.search_ms.items()}
        return facts

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Retrieval:
        """Return what `to_dict` wrote."""
        facts = dict(data)
        facts["events"] = [Event(**event) for event in data.get("events", ())]
        facts["search_ms"] = {int(n): ms for n, ms in data.get("search_ms", {}).items()}
        return cls(**facts)
