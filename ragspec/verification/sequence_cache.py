"""Keys and values of one sequence, in buffers that are written in place and never concatenated.

Slots below `length` hold committed tokens, slot = position. Up to `pending` speculative slots
follow, filled by one or more forwards. Accepted slots then move down to close the gaps, and the
others are dropped. Sliding and chunked layers keep every slot too: the mask enforces their window,
so that rejected drafts cannot evict keys.

A forward over several sequences is packed: their tokens follow each other in one row of the model,
without padding, and each sequence attends to its own buffers (see `tree_attention`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

GROWTH = 8  # a full buffer grows by one in so many of its slots
# Keys and values [copies, heads, T, width] by the number of the layer.
Layers = Mapping[int, tuple[Tensor, Tensor]]


class SequenceCache:
    """The keys and values of one sequence; buffers are created on the first use of their layer.

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
        self.capacity = capacity
        self.copies = copies
        self.length = self.pending = 0
        self.hidden = (0,) * copies
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    @classmethod
    def of(cls, layers: Layers) -> SequenceCache:
        """Return a cache over these keys and values, which are not copied."""
        keys = next(iter(layers.values()))[0]
        cache = cls(keys.shape[2], keys.shape[0])
        cache._keys = {layer: pair[0] for layer, pair in layers.items()}
        cache._values = {layer: pair[1] for layer, pair in layers.items()}
        cache.length = keys.shape[2]
        return cache

    @property
    def extent(self) -> int:
        """Slots in use, speculative ones included."""
        return self.length + self.pending

    @property
    def device(self) -> torch.device:
        """The device of the first buffer."""
        return next(iter(self._keys.values())).device

    @property
    def bytes(self) -> int:
        """Bytes of the buffers."""
        return sum(each.nbytes for each in (*self._keys.values(), *self._values.values()))

    def layers(self, length: int) -> dict[int, tuple[Tensor, Tensor]]:
        """Return views of the first slots of all layers, by the number of the layer."""
        return {
            layer: (keys[:, :, :length], self._values[layer][:, :, :length])
            for layer, keys in self._keys.items()
        }

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write n new slots in place; return views of all slots up to them.

        Shapes: [C, heads, n, width] -> two views [C, heads, extent + n, width].
        """
        start = self.extent
        end = start + keys.shape[2]
        for buffers, states in ((self._keys, keys), (self._values, values)):
            if layer not in buffers or end > buffers[layer].shape[2]:
                self._grow(buffers, layer, states, end)
            buffers[layer][:, :, start:end] = states
        return self._keys[layer][:, :, :end], self._values[layer][:, :, :end]

    def advance(self, n: int) -> None:
        """Count n slots, just written by a forward, as speculative."""
        self.pending += n

    def commit(self, slots: Sequence[int]) -> None:
        """Keep these speculative slots, in ascending order, and drop the others."""
        commit_slots([self], [slots])

    def truncate(self, length: int) -> None:
        """Keep at most the first `length` committed slots, and drop speculative ones."""
        self.length, self.pending = min(length, self.length), 0

    def copy(self, length: int, room: int) -> SequenceCache:
        """Return a copy of the first committed slots, with room for more."""
        other = SequenceCache(length + room, self.copies)
        for layer, (keys, values) in self.layers(length).items():
            other.write(layer, keys, values)
        other.length, other.hidden = length, self.hidden
        return other

    def compact(self) -> None:
        """Give back the memory behind the committed slots if it is more than a growth."""
        self.pending = 0
        if self.capacity - self.length > self.length // GROWTH + 64:
            for buffers in (self._keys, self._values):
                for layer, buffer in buffers.items():
                    buffers[layer] = buffer[:, :, : self.length].clone()
            self.capacity = self.length

    def _grow(self, buffers: dict[int, Tensor], layer: int, states: Tensor, end: int) -> None:
        """Make a buffer that holds `end` slots, with the slots of the old one."""
        if end > self.capacity:
            self.capacity = end + max(end // GROWTH, 1)
        copies, heads, _, width = states.shape
        buffer = states.new_zeros(copies, heads, self.capacity, width)
        if layer in buffers:
            buffer[:, :, : self.extent] = buffers[layer][:, :, : self.extent]
        buffers[layer] = buffer

    def move(self, source: Tensor, start: int) -> None:
        """Copy slots i64 [n] down to those from `start` on, in all layers."""
        target = slice(start, start + len(source))
        for buffers in (self._keys, self._values):
            for buffer in buffers.values():
                source = source.to(buffer.device)
                buffer[:, :, target] = buffer.index_select(2, source)


def commit_slots(rows: Sequence[SequenceCache], accepted: Sequence[Sequence[int]]) -> None:
    """Keep these speculative slots of each sequence, and drop all others; see `commit`."""
    moves: list[tuple[SequenceCache, list[int], int]] = []
    for row, slots in zip(rows, accepted, strict=True):
        first = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
        if first < len(slots):
            moves.append((row, [row.length + slot for slot in slots[first:]], row.length + first))
    if moves:  # with one copy to the device
        device = moves[0][0].device
        index = torch.tensor([slot for _, source, _ in moves for slot in source], device=device)
        parts = torch.split(index, [len(source) for _, source, _ in moves])
        for (row, _, start), source in zip(moves, parts, strict=True):
            row.move(source, start)
    for row, slots in zip(rows, accepted, strict=True):
        row.length += len(slots)
        row.pending = 0


class _Layer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer of a `BatchCache`, as transformers' models ask for it."""

    is_sliding = False
    is_croppable = True

    def __init__(self, cache: BatchCache) -> None:
        super().__init__()
        self._cache = cache
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: buffers are created as they are written."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Refuse: a layer does not know its number."""
        raise NotImplementedError("expected BatchCache.update")

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that the queries read, and their offset 0."""
        return self._cache.extent + query_length, 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self._cache.extent

    def get_max_length(self) -> int:
        """Return -1: the buffers grow."""
        return -1


class BatchCache(Cache):  # type: ignore[misc, unused-ignore]
    """The caches of the sequences of one forward, as one transformers cache.

    Attributes:
        rows: The sequences, in the order of their tokens.
        counts: The tokens of each in the forward; one sequence has all.
    """

    def __init__(self, rows: Sequence[SequenceCache], counts: Sequence[int] = ()) -> None:
        super().__init__(layers=[])
        self.rows = list(rows)
        self.counts = list(counts)
        self._parts: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}

    @property
    def extent(self) -> int:
        """Slots in use, of all sequences together."""
        return sum(row.extent for row in self.rows)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new slots of layer `layer_idx`; see `SequenceCache.write`.

        Of several sequences the new states return, by which `parts` finds the slots of each.
        """
        while len(self.layers) <= layer_idx:
            self.layers.append(_Layer(self))
        if len(self.rows) == 1:
            return self.rows[0].write(layer_idx, key_states, value_states)
        keys = torch.split(key_states, self.counts, 2)
        values = torch.split(value_states, self.counts, 2)
        parts = [
            row.write(layer_idx, *pair) for row, *pair in zip(self.rows, keys, values, strict=True)
        ]
        self._parts[id(key_states)] = key_states, parts
        return key_states, value_states

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of slots that the queries read, and their offset 0."""
        return self.extent + query_length, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the slots in use."""
        return self.extent

    def parts(self, key: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each sequence, in the layer that returned `key`.

        Raises:
            KeyError: The model has changed the keys before it attends.
        """
        return self._parts[id(key)][1]

    def advance(self, n: int) -> None:
        """Count the slots of a forward over n tokens as speculative."""
        self._parts.clear()
        for row, count in zip(self.rows, self.counts or [n], strict=True):
            row.advance(count)


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the cache bytes per token of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * groups * width * dtype.itemsize
