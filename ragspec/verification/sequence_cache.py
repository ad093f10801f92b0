"""Keys and values of one sequence, in buffers that are written in place.

Slots below `length` hold committed tokens, slot = position. Up to `pending` speculative slots
follow, filled by one or more forwards. Accepted slots then move down to close the gaps, and the
others are dropped. Sliding and chunked layers keep every slot too: the mask enforces their window,
so that rejected drafts cannot evict keys.

Sequences that begin alike share their first slots. One of them writes the buffers, and the others
are views: they read its first slots and write later ones to buffers that they do not share. A
forward over several sequences attends to shared slots once for all of them (Hydragen, arXiv
2402.05099; see `batch_cache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

GROWTH = 8  # a full buffer grows by one in so many of its slots
LEAST_SHARED = 256  # slots; fewer are copied, because each shared part costs some operations
PAGE = 64  # shared slots end at a multiple, so that texts that part nearby share the same ones
MOST_PARTS = 4  # shared parts of a sequence
# Keys and values [copies, heads, T, width] by the number of the layer.
Layers = Mapping[int, tuple[Tensor, Tensor]]


class Buffers:
    """Keys and values of consecutive slots in all layers, [C, heads, capacity, width] each.

    Attributes:
        fixed: First slots that views read, so that they must not change.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.fixed = 0
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    @property
    def bytes(self) -> int:
        """Bytes of all layers."""
        return sum(each.nbytes for each in (*self.keys.values(), *self.values.values()))

    def slots(self, layer: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Return views of the keys and values of some slots."""
        return self.keys[layer][:, :, start:end], self.values[layer][:, :, start:end]

    def resized(self, start: int, end: int, capacity: int) -> Buffers:
        """Return new buffers that begin with these slots."""
        other = Buffers(capacity)
        for layer in self.keys:
            other.write(layer, 0, *self.slots(layer, start, end))
        return other

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write slots from `start` on; a layer's buffers are created on its first use."""
        for buffers, states in ((self.keys, keys), (self.values, values)):
            if layer not in buffers:
                copies, heads, _, width = states.shape
                buffers[layer] = states.new_empty(copies, heads, self.capacity, width)
            buffers[layer][:, :, start : start + states.shape[2]] = states


class SlotRange(NamedTuple):
    """Slots `start` to `end` of buffers."""

    buffers: Buffers
    start: int
    end: int


class SequenceCache:
    """The keys and values of one sequence: shared parts, then the slots that it writes.

    A sequence may have several *copies* (guidance runs a model on a pair): the batch axis of its
    buffers. They have one length.

    Args:
        capacity: The slots of new buffers.
        copies: C.

    Attributes:
        length: Committed slots.
        pending: Speculative slots.
        hidden: First slots of each copy that only themselves see: a prompt's padding.
        parts: The first slots, in the buffers of other sequences.
        start: The number of slots in `parts`.
        tail: The buffers of later slots, which only this sequence writes.
    """

    def __init__(self, capacity: int, copies: int = 1) -> None:
        self.copies = copies
        self.length = self.pending = self.start = 0
        self.hidden = (0,) * copies
        self.parts: tuple[SlotRange, ...] = ()
        self.tail = Buffers(capacity)

    @classmethod
    def of(cls, layers: Layers) -> SequenceCache:
        """Return a cache over these keys and values, which are not copied."""
        keys = next(iter(layers.values()))[0]
        cache = cls(keys.shape[2], keys.shape[0])
        cache.tail.keys = {layer: pair[0] for layer, pair in layers.items()}
        cache.tail.values = {layer: pair[1] for layer, pair in layers.items()}
        cache.length = keys.shape[2]
        return cache

    @property
    def extent(self) -> int:
        """Slots in use, speculative ones included."""
        return self.length + self.pending

    @property
    def capacity(self) -> int:
        """The slots for which there are buffers."""
        return self.start + self.tail.capacity

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return next(iter(self.tail.keys.values())).device

    @property
    def bytes(self) -> int:
        """Bytes of the buffers, shared ones included."""
        return total_bytes([self])

    @property
    def ranges(self) -> list[SlotRange]:
        """The committed slots, in order."""
        return [*self.parts, SlotRange(self.tail, 0, self.length - self.start)]

    def layers(self, length: int, start: int = 0) -> dict[int, tuple[Tensor, Tensor]]:
        """Return the keys and values of some slots by layer: views unless they are in parts."""
        ranges, first = list[SlotRange](), 0
        for buffers, _, count in self.ranges:
            part = SlotRange(buffers, max(start - first, 0), min(length - first, count))
            if part.start < part.end:
                ranges.append(part)
            first += count
        joined = {}
        for layer in ranges[0].buffers.keys if ranges else ():
            pairs = [each.buffers.slots(layer, each.start, each.end) for each in ranges]
            keys, values = zip(*pairs, strict=True)
            whole = (torch.cat(keys, 2), torch.cat(values, 2)) if len(pairs) > 1 else pairs[0]
            joined[layer] = whole
        return joined

    def reserve(self, n: int) -> None:
        """Make room for n new slots; slots that views read stay where they are."""
        end, tail = self.extent + n - self.start, self.tail
        if end <= tail.capacity:
            return
        fixed = tail.fixed
        end -= fixed
        self.tail = tail.resized(fixed, self.extent - self.start, end + max(end // GROWTH, 1))
        if fixed:
            self.parts, self.start = (*self.parts, SlotRange(tail, 0, fixed)), self.start + fixed

    def write(
        self, layer: int, keys: Tensor, values: Tensor, first: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Write n new slots in place; return views of all slots after the shared parts.

        Shapes: [C, heads, n, width] -> two views [C, heads, extent + n - max(first, start), width].

        Args:
            first: The slot with which the returned views begin, if it is not in the shared parts.
        """
        self.reserve(keys.shape[2])
        start = self.extent - self.start
        self.tail.write(layer, start, keys, values)
        return self.tail.slots(layer, max(first - self.start, 0), start + keys.shape[2])

    def advance(self, n: int) -> None:
        """Count n slots, just written by a forward, as speculative."""
        self.pending += n

    def commit(self, slots: Sequence[int]) -> None:
        """Keep these speculative slots, in ascending order, and drop the others."""
        commit_slots([self], [slots])

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` committed slots, and drop speculative ones."""
        length, self.pending = min(length, self.length), 0
        if length - self.start < self.tail.fixed:  # views read what would be written next
            view = self.prefix(length, PAGE)
            self.parts, self.start, self.tail = view.parts, view.start, view.tail
        self.length = length

    def prefix(self, length: int, room: int, share: bool = True) -> SequenceCache:
        """Return a cache of the first committed slots, with room for more.

        Args:
            share: Read them in the same buffers, as far as that pays; False copies them.
        """
        parts, start = list[SlotRange](), 0
        for part in self.ranges if share else ():
            count = min(part.end, length - start)
            if count < part.end or part.buffers is self.tail:
                count -= count % PAGE
            if count < LEAST_SHARED or len(parts) == MOST_PARTS:
                break
            part.buffers.fixed = max(part.buffers.fixed, count)
            parts.append(SlotRange(part.buffers, 0, count))
            start += count
            if count < part.end:
                break
        other = SequenceCache(length - start + room, self.copies)
        for layer, pair in self.layers(length, start).items():
            other.tail.write(layer, 0, *pair)
        other.parts, other.start, other.length, other.hidden = (*parts,), start, length, self.hidden
        return other

    def unshare(self) -> None:
        """Copy the shared parts, so that all slots lie in buffers of this sequence."""
        if self.parts and not self.pending:
            whole, self.tail = self.layers(self.length), Buffers(self.capacity)
            self.parts, self.start = (), 0
            for layer, pair in whole.items():
                self.tail.write(layer, 0, *pair)

    def compact(self) -> None:
        """Give back the memory behind the committed slots if it is more than a growth."""
        self.pending, used = 0, self.length - self.start
        if not self.tail.fixed and self.tail.capacity - used > used // GROWTH + 64:
            self.tail = self.tail.resized(0, used, used)

    def move(self, source: Tensor, start: int) -> None:
        """Copy slots i64 [n] of the tail down to those from `start` on, in all layers."""
        target = slice(start, start + len(source))
        for buffer in (*self.tail.keys.values(), *self.tail.values.values()):
            source = source.to(buffer.device)
            buffer[:, :, target] = buffer.index_select(2, source)


def total_bytes(caches: Iterable[SequenceCache]) -> int:
    """Return the bytes of these caches, buffers that they share counted once."""
    held = {id(part.buffers): part.buffers for cache in caches for part in cache.ranges}
    return sum(buffers.bytes for buffers in held.values())


def commit_slots(rows: Sequence[SequenceCache], accepted: Sequence[Sequence[int]]) -> None:
    """Keep these speculative slots of each sequence, and drop all others; see `commit`."""
    moves: list[tuple[SequenceCache, list[int], int]] = []
    for row, slots in zip(rows, accepted, strict=True):
        first = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
        if first < len(slots):
            used = row.length - row.start
            moves.append((row, [used + slot for slot in slots[first:]], used + first))
    if moves:  # with one copy to the device
        device = moves[0][0].device
        index = torch.tensor([slot for _, source, _ in moves for slot in source], device=device)
        parts = torch.split(index, [len(source) for _, source, _ in moves])
        for (row, _, start), source in zip(moves, parts, strict=True):
            row.move(source, start)
    for row, slots in zip(rows, accepted, strict=True):
        row.length += len(slots)
        row.pending = 0


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the cache bytes per token of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * groups * width * dtype.itemsize
