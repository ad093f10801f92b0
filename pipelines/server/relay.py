"""From the pool's thread to the event loop: what tickets emit, without waiting in either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ragspec.engine.output import TextChunks
from ragspec.pipelines.server.token_offsets import Placed, TokenOffsets

if TYPE_CHECKING:
    from ragspec.engine.handle import RequestHandle
    from ragspec.engine.output import Generation


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


async def whole(handles: Sequence[RequestHandle]) -> list[Generation]:
    """Return the texts of tickets once all have ended; raises what ended the first that failed."""
    return list(await asyncio.gather(*(asyncio.wrap_future(each.future) for each in handles)))


async def events(handles: Sequence[RequestHandle], tokenizer: Any) -> AsyncIterator[Event]:
    """Yield what tickets emit, as it comes, until all have ended; raises what ended one."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Queue[int] = asyncio.Queue()

    def on_progress(index: int) -> None:
        try:
            loop.call_soon_threadsafe(ready.put_nowait, index)
        except RuntimeError:  # the loop was closed: nobody listens any more
            handles[index].cancel()

    for index, handle in enumerate(handles):
        handle.watch(lambda index=index: on_progress(index))  # type: ignore[misc]
    readers = [
        _Reader(index, request_handle, tokenizer) for index, request_handle in enumerate(handles)
    ]
    left = len(readers)
    while left:
        event = readers[await ready.get()].read()
        if event is not None:
            yield event
            left -= event.generation is not None


class _Reader:
    """One ticket, of which something is known to have come."""

    def __init__(self, index: int, handle: RequestHandle, tokenizer: Any) -> None:
        self.index = index
        self.handle = handle
        self.chunks = TextChunks(tokenizer, handle.settings.stop.strings)
        self.token_offsets = None if handle.settings.logprobs is None else TokenOffsets(tokenizer)
        self.sent = 0  # characters

    def read(self) -> Event | None:
        """Take what has come; None where it completes no text."""
        emission = next(self.handle, None)
        if emission is None:
            generation = self.handle.result()
            rest = self.chunks.new(generation.text)
            placed = None if self.token_offsets is None else self.token_offsets.rest(generation)
            return Event(self.index, rest, placed, generation)
        self.chunks.push(emission.step.tokens)
        # The text's end knows what of its last step belongs to a stop string.
        text = "" if emission.row.done else self.chunks.new()
        if not text:
            return None
        self.sent += len(text)
        if self.token_offsets is None:
            return Event(self.index, text)
        return Event(self.index, text, self.token_offsets.upto(self.sent, emission.row.scored))
