"""From the pool's thread to the event loop: what tickets emit, without waiting in either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragspec.engine.stream import Pieces
from ragspec.pipelines.server.placing import Placed, Placing

if TYPE_CHECKING:
    from ragspec.engine.output import Generation
    from ragspec.engine.ticket import Ticket


@dataclass(frozen=True, slots=True)
class Event:
    """A piece of text number `index`, or its end.

    placed: log-probabilities of the piece's tokens, where they are kept. generation: once it has
    ended.
    """

    index: int
    text: str
    placed: Sequence[Placed] | None = None
    generation: Generation | None = None


async def whole(tickets: Sequence[Ticket]) -> list[Generation]:
    """Return the texts of tickets once all have ended; raises what ended the first that failed."""
    return list(await asyncio.gather(*(asyncio.wrap_future(each.future) for each in tickets)))


async def events(tickets: Sequence[Ticket], tokenizer: Any) -> AsyncIterator[Event]:
    """Yield what tickets emit, as it comes, until all have ended; raises what ended one."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[int] = asyncio.Queue()

    def on_progress(index: int) -> None:
        try:
            loop.call_soon_threadsafe(ready.put_nowait, index)
        except RuntimeError:  # the loop was closed: nobody listens any more
            tickets[index].cancel()

    for index, handle in enumerate(tickets):
        handle.watch(lambda index=index: on_progress(index))  # type: ignore[misc]
    readers = [
        _Reader(index, request_handle, tokenizer) for index, request_handle in enumerate(tickets)
    ]
    left = len(readers)
    while left:
        event = readers[await ready.get()].read()
        if event is not None:
            yield event
            left -= event.generation is not None


class _Reader:
    """One ticket, of which something is known to have come."""

    def __init__(self, index: int, handle: Ticket, tokenizer: Any) -> None:
        self.index = index
        self.ticket = handle
        self.pieces = Pieces(tokenizer, handle.settings.stop.strings)
        self.placing = None if handle.settings.logprobs is None else Placing(tokenizer)
        self.given = 0  # characters

    def read(self) -> Event | None:
        """Take what has come; None where it completes no text."""
        emission = next(self.ticket, None)
        if emission is None:
            generation = self.ticket.result()
            rest = self.pieces.new(generation.text)
            placed = None if self.placing is None else self.placing.rest(generation)
            return Event(self.index, rest, placed, generation)
        self.pieces.push(emission.step.tokens)
        # The text's end knows what of its last step belongs to a stop string.
        text = "" if emission.row.done else self.pieces.new()
        if not text:
            return None
        self.given += len(text)
        if self.placing is None:
            return Event(self.index, text)
        return Event(self.index, text, self.placing.upto(self.given, emission.row.scored))
