"""Text shown while it is written in parts, of which later ones may be taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class AnswerStream:
    """Hands on text that stays, but for what may be the beginning of a stop string."""

    stream: Callable[[str], None] | None
    stops: Sequence[str] | str = ()
    text: str = ""
    sent: int = 0

    def push(self, text: str, *, ends: bool) -> None:
        """Take all of the text that will not be taken back; ends: whether none will follow."""
        self.text = text
        stops = (self.stops,) if isinstance(self.stops, str) else self.stops
        held = 0 if ends else max((len(stop) for stop in stops), default=1) - 1
        self._give(len(text) if ends else len(text.rstrip("\ufffd")) - held)

    def end(self) -> None:
        """Hand on what was held back."""
        self._give(len(self.text))

    def _give(self, end: int) -> None:
        if self.stream is not None and end > self.sent:
            self.stream(self.text[self.sent : end])
            self.sent = end
