"""The slot cache: keys and values in buffers that are written in place and never concatenated.

Row b owns slots 0 .. capacity. Slots below `lengths[b]` hold committed tokens, slot = position.
Above them lie up to `pending` speculative slots, filled by one or more forwards and then either
kept (the accepted ones move down to close the gaps) or forgotten. Sliding and chunked layers keep
every slot too: their window is enforced by the mask, so that no draft that is
forgotten takes a key along.

A sequence may own several rows of the buffers, its *copies* (guidance runs a model on a pair): with
B sequences, copy c of sequence b is buffer row c * B + b. Lengths are those of sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from ragspec.target.base import Beginning


class SlotBook:
    """What all layers of one cache share: lengths of the rows and the speculative region."""

    def __init__(self, rows: int, capacity: int, copies: int = 1) -> None:
        self.lengths = [0] * rows
        self.pending = 0
        self.capacity = capacity
        self.copies = copies
        # First slots of each row, by copy, that they alone see: a prompt's padding.
        self.hidden: list[tuple[int, ...]] = [(0,) * copies] * rows
        self.block = 1  # keys are read in whole blocks of so many slots, after the prompt
        self._columns: tuple[int, torch.Tensor] | None = None

    @property
    def extent(self) -> int:
        """Slots in use in the longest row, speculative ones included."""
        return max(self.lengths) + self.pending

    def read(self, n: int) -> int:
        """Return how many slots n more queries read: those in use, and what fills up a block."""
        end = self.extent + n
        return -(-end // self.block) * self.block if any(self.lengths) else end

    @property
    def even(self) -> bool:
        """Whether all rows have the same length, so that a write is one slice."""
        return min(self.lengths) == max(self.lengths)

    def columns(self, n: int, device: torch.device) -> torch.Tensor:
        """Return the slots that the next n tokens of every buffer row go to: i64 [C * B, n]."""
        if self._columns is None or self._columns[0] != n:
            starts = torch.tensor(self.lengths * self.copies, device=device) + self.pending
            self._columns = (n, starts[:, None] + torch.arange(n, device=device))
        return self._columns[1].to(device)

    def moved(self) -> None:
        """Forget what was derived from the lengths; call after every change of them."""
        self._columns = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer's keys and values: [C * B, heads, capacity, width], grown by doubling."""

    is_sliding = False
    is_croppable = True

    def __init__(self, book: SlotBook) -> None:
        super().__init__()
        self.book = book

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate the buffers; head counts and widths are read off the first states."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write n new slots in place and return views up to the last slot in use.

        Shapes: [C * B, heads, n, width] -> two views [C * B, heads, extent + n, width], with what
        fills up a block behind them.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = key_states.shape[-2]
        end = self.book.extent + n
        read = self.book.read(n)
        if read > self.keys.shape[-2]:
            self.keys = _grown(self.keys, read)
            self.values = _grown(self.values, read)
        if self.book.even:
            self.keys[:, :, end - n : end] = key_states
            self.values[:, :, end - n : end] = value_states
        else:
            columns = self.book.columns(n, key_states.device)
            rows = torch.arange(len(columns), device=columns.device)[:, None]
            self.keys[rows, :, columns] = key_states.transpose(1, 2)
            self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self.keys[:, :, :read], self.values[:, :, :read]

    def move(self, row: int, source: torch.Tensor, target: slice) -> None:
        """Copy slots `source` i64 [A] of one sequence to the slots of `target`."""
        for buffer in (self.keys, self.values):
            own = buffer[row :: len(self.book.lengths)]
            own[:, :, target] = own.index_select(2, source)

    def select(self, rows: torch.Tensor) -> None:
        """Keep the given buffer rows i64 [B'], in that order; one may be named several times."""
        self.keys = self.keys.index_select(0, rows.to(self.keys.device))
        self.values = self.values.index_select(0, rows.to(self.values.device))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that n more queries see, and their offset 0."""
        return self.book.read(query_length), 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self.book.extent

    def get_max_length(self) -> int:
        """Return -1: the buffers grow."""
        return -1

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        batch, heads, n, width = states.shape
        capacity = max(self.book.capacity, self.book.extent + n)
        return states.new_zeros(batch, heads, capacity, width)


class SlotCache(Cache):  # type: ignore[misc, unused-ignore]
    """A transformers cache of slot layers, made as the model asks for them.

    rows: sequences, B. capacity: slots to begin with. copies: buffer rows of each sequence.
    """

    def __init__(self, rows: int, capacity: int, copies: int = 1) -> None:
        super().__init__(layers=[])
        self.book = SlotBook(rows, capacity, copies)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write into layer `layer_idx`, made on first use; see `SlotLayer.update`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self.book))
        layer: SlotLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def advance(self, n: int) -> None:
        """Count n slots, just written by a forward, as speculative."""
        self.book.pending += n
        self.book.moved()

    def commit(self, kept: Sequence[Sequence[int]]) -> None:
        """Keep, for each row, these of its speculative slots (ascending) and drop the others."""
        book = self.book
        for row, slots in enumerate(kept):
            start = book.lengths[row]
            first = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            if first < len(slots):
                self._move(row, [start + s for s in slots[first:]], start + first)
            book.lengths[row] = start + len(slots)
        book.pending = 0
        book.moved()

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order; naming one several times copies it."""
        before, copies = len(self.book.lengths), range(self.book.copies)
        index = torch.tensor([copy * before + row for copy in copies for row in rows])
        for layer in self.layers:
            if layer.is_initialized:
                layer.select(index)
        self.book.lengths = [self.book.lengths[row] for row in rows]
        self.book.hidden = [self.book.hidden[row] for row in rows]
        self.book.moved()

    def truncate(self, row: int, length: int) -> None:
        """Forget all but the first `length` committed tokens of a row."""
        self.book.lengths[row] = min(length, self.book.lengths[row])
        self.book.moved()

    def beginning(self, length: int) -> Beginning | None:
        """Return copies of the first slots of all layers; None for more than one row of buffers."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        if not layers or len(layers) < len(self.layers) or layers[0].keys.shape[0] != 1:
            return None
        return [
            (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone())
            for layer in layers
        ]

    def begin_with(self, beginning: Beginning) -> None:
        """Fill the first slots of the one row; what was there is forgotten."""
        self.book.lengths[0] = self.book.pending = 0
        self.book.moved()
        for index, (keys, values) in enumerate(beginning):
            self.update(keys, values, index)
        self.book.lengths[0] = beginning[0][0].shape[-2] if beginning else 0
        self.book.moved()

    def _move(self, row: int, source: list[int], start: int) -> None:
        target = slice(start, start + len(source))
        index: torch.Tensor | None = None
        for layer in self.layers:
            if layer.is_initialized:
                if index is None or index.device != layer.keys.device:
                    index = torch.tensor(source, device=layer.keys.device)
                layer.move(row, index, target)


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes that one token takes in the cache of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * groups * width * dtype.itemsize


def _grown(buffer: torch.Tensor, needed: int) -> torch.Tensor:
    batch, heads, capacity, width = buffer.shape
    grown = buffer.new_zeros(batch, heads, max(needed, 2 * capacity), width)
    grown[:, :, :capacity] = buffer
    return grown
