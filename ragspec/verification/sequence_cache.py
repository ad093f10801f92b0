"""Keys and values of one sequence, in buffers that are written in place.

Slots below `length` hold committed tokens, slot = position. Up to `pending` speculative slots
follow, filled by one or more forwards. Accepted slots then move down to close the gaps, and the
others are dropped. Sliding and chunked layers keep every slot too: the mask enforces their window,
so that rejected drafts cannot evict keys.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ragspec.types import PreTrainedConfig

GROWTH = 8  # a full buffer grows by one in so many of its slots
KeysValues = tuple[Tensor, Tensor]  # [copies, heads, T, width] each
Layers = Mapping[int, KeysValues]  # by the number of the layer


class Buffers:
    """Keys and values of consecutive slots in all layers, [C, heads, capacity, width] each."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def slots(self, layer: int, start: int, end: int) -> KeysValues:
        """Return views of the keys and values of some slots."""
        return self.keys[layer][:, :, start:end], self.values[layer][:, :, start:end]

    def resized(self, end: int, capacity: int) -> "Buffers":
        """Return new buffers that begin with the slots up to `end`."""
        other = Buffers(capacity)
        for layer in self.keys:
            other.write(layer, 0, *self.slots(layer, 0, end))
        return other

    def write(self, layer: int, start: int, keys: Tensor, values: Tensor) -> None:
        """Write slots from `start` on; a layer's buffers are created on its first use."""
        for buffers, states in ((self.keys, keys), (self.values, values)):
            if layer not in buffers:
                copies, heads, _, width = states.shape
                buffers[layer] = states.new_empty(copies, heads, self.capacity, width)
            buffers[layer][:, :, start : start + states.shape[2]] = states


class SequenceCache:
    """The keys and values of one sequence.

    A sequence may have several *copies* (guidance runs a model on a pair): the batch axis of its
    buffers. They have one length.

    Args:
        capacity: The slots of new buffers.
        copies: C.

    Attributes:
        length: Committed slots.
        pending: Speculative slots.
        hidden: First slots of each copy that only themselves see: a prompt's padding.
    """

    def __init__(self, capacity: int, copies: int = 1) -> None:
        self.copies = copies
        self.length = self.pending = 0
        self.hidden = (0,) * copies
        self.buffers = Buffers(capacity)

    @classmethod
    def of(cls, layers: Layers) -> "SequenceCache":
        """Return a cache over these keys and values, which are not copied."""
        keys = next(iter(layers.values()))[0]
        cache = cls(keys.shape[2], keys.shape[0])
        cache.buffers.keys = {layer: pair[0] for layer, pair in layers.items()}
        cache.buffers.values = {layer: pair[1] for layer, pair in layers.items()}
        cache.length = keys.shape[2]
        return cache

    @property
    def extent(self) -> int:
        """Slots in use, speculative ones included."""
        return self.length + self.pending

    @property
    def bytes(self) -> int:
        """Bytes of the buffers."""
        layers = *self.buffers.keys.values(), *self.buffers.values.values()
        return sum(each.nbytes for each in layers)

    def layers(self, length: int) -> dict[int, KeysValues]:
        """Return views of the keys and values of the first slots by layer."""
        return {layer: self.buffers.slots(layer, 0, length) for layer in self.buffers.keys}

    def reserve(self, n: int) -> None:
        """Make room for n new slots."""
        if (end := self.extent + n) > self.buffers.capacity:
            self.buffers = self.buffers.resized(self.extent, end + max(end // GROWTH, 1))

    def write(self, layer: int, keys: Tensor, values: Tensor) -> KeysValues:
        """Write n new slots in place; return views of all slots.

        Shapes: [C, heads, n, width] -> two views [C, heads, extent + n, width].
        """
        self.reserve(keys.shape[2])
        self.buffers.write(layer, self.extent, keys, values)
        return self.buffers.slots(layer, 0, self.extent + keys.shape[2])

    def commit(self, slots: Sequence[int]) -> None:
        """Keep these speculative slots, in ascending order, and drop the others."""
        commit_slots([self], [slots])

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` committed slots, and drop speculative ones."""
        self.length, self.pending = min(length, self.length), 0

    def prefix(self, length: int, room: int) -> "SequenceCache":
        """Return a copy of the first committed slots, with room for more."""
        other = SequenceCache(length + room, self.copies)
        other.buffers = self.buffers.resized(length, length + room)
        other.length, other.hidden = length, self.hidden
        return other

    def compact(self) -> None:
        """Give back the memory behind the committed slots if it is more than a growth."""
        self.pending = 0
        if self.buffers.capacity - self.length > self.length // GROWTH + 64:
            self.buffers = self.buffers.resized(self.length, self.length)

    def move(self, source: Tensor, start: int) -> None:
        """Copy slots i64 [n] down to those from `start` on, in all layers."""
        for buffer in (*self.buffers.keys.values(), *self.buffers.values.values()):
            source = source.to(buffer.device)
            buffer[:, :, start : start + len(source)] = buffer.index_select(2, source)


def commit_slots(rows: Sequence[SequenceCache], accepted: Sequence[Sequence[int]]) -> None:
    """Keep these speculative slots of each sequence, and drop all others; see `commit`."""
    moves: list[tuple[SequenceCache, list[int], int]] = []
    for row, slots in zip(rows, accepted, strict=True):
        first = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
        if first < len(slots):
            start = row.length
            moves.append((row, [start + slot for slot in slots[first:]], start + first))
    if moves:  # with one copy to the device
        device = next(iter(moves[0][0].buffers.keys.values())).device
        index = torch.tensor([slot for _, source, _ in moves for slot in source], device=device)
        parts = torch.split(index, [len(source) for _, source, _ in moves])
        for (row, _, start), source in zip(moves, parts, strict=True):
            row.move(source, start)
    for row, slots in zip(rows, accepted, strict=True):
        row.length += len(slots)
        row.pending = 0


def slot_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the cache bytes per token of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * groups * width * dtype.itemsize
