"""The slot cache: keys and values in buffers that are written in place and never concatenated.

Row b owns slots 0 .. capacity. Slots below `lengths[b]` hold committed tokens, slot = position. Up
to `pending` speculative slots follow, filled by one or more forwards. Accepted slots then move down
to close the gaps, and the others are dropped. Sliding and chunked layers keep every slot too: the
mask enforces their window, so that rejected drafts cannot evict keys.

A sequence may own several rows of the buffers, its *copies* (guidance runs a model on a pair). With
R sequences, copy c of sequence b is buffer row c * R + b. Lengths are those of sequences.

A forward covers the *selected* sequences: B of the R, adjacent in the buffers so that their keys
are one view. At first these are all; `select_rows` selects others and moves as few as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers.cache_utils import Cache, CacheLayerMixin

from ragspec.verification.base import Beginning


class SlotBook:
    """The state that all layers of one cache share, such as the lengths of the selected rows.

    Attributes:
        rows: R, including rows out of line.
        first: The place in the buffers of the first selected row.
        pending: Speculative slots, the same number for each row.
        hidden: First slots of each row, by copy, that only themselves see: a prompt's padding.
        block: After the prompt, keys are read in whole blocks of this many slots.
    """

    def __init__(self, rows: int, capacity: int, copies: int = 1) -> None:
        self.rows = rows
        self.first = 0
        self.lengths = [0] * rows
        self.pending = 0
        self.capacity = capacity
        self.copies = copies
        self.hidden: list[tuple[int, ...]] = [(0,) * copies] * rows
        self.block = 1
        self._places: tuple[int, Tensor, Tensor] | None = None

    @property
    def extent(self) -> int:
        """Slots in use in the longest row, speculative ones included."""
        return max(self.lengths) + self.pending

    def read(self, n: int) -> int:
        """Return how many slots n more queries read: those in use, rounded up to whole blocks."""
        end = self.extent + n
        return -(-end // self.block) * self.block if any(self.lengths) else end

    @property
    def even(self) -> bool:
        """Whether all rows have the same length, so that a write is one slice."""
        return min(self.lengths) == max(self.lengths)

    @property
    def whole(self) -> bool:
        """Whether all rows are selected."""
        return len(self.lengths) == self.rows

    def places(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return buffer rows i64 [C * B, 1] and slots i64 [C * B, n] of the next n tokens."""
        if self._places is None or self._places[0] != n:
            starts = torch.tensor(self.lengths * self.copies, device=device) + self.pending
            rows = torch.arange(self.copies, device=device)[:, None] * self.rows + self.first
            rows = (rows + torch.arange(len(self.lengths), device=device)).reshape(-1, 1)
            self._places = (n, rows, starts[:, None] + torch.arange(n, device=device))
        return self._places[1].to(device), self._places[2].to(device)

    def moved(self) -> None:
        """Clear values derived from the lengths. Call it after every change of lengths."""
        self._places = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer's keys and values: [C * R, heads, capacity, width], grown by doubling."""

    is_sliding = False
    is_croppable = True

    def __init__(self, book: SlotBook) -> None:
        super().__init__()
        self.book = book

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers, with the head counts and widths of the first states."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write n new slots in place and return views up to the last slot in use.

        Shapes: [C * B, heads, n, width] -> two views [C * B, heads, S, width]. S is extent + n,
        rounded up to whole blocks.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        n = key_states.shape[-2]
        end = self.book.extent + n
        read = self.book.read(n)
        if read > self.keys.shape[-2]:
            self.keys = _grown(self.keys, read)
        if read > self.values.shape[-2]:  # a separate check: memory may run out between the two
            self.values = _grown(self.values, read)
        if self.book.even:
            self._active_rows(self.keys)[..., end - n : end, :] = self._by_copy(key_states)
            self._active_rows(self.values)[..., end - n : end, :] = self._by_copy(value_states)
        else:
            rows, columns = self.book.places(n, key_states.device)
            self.keys[rows, :, columns] = key_states.transpose(1, 2)
            self.values[rows, :, columns] = value_states.transpose(1, 2)
        return self._visible(self.keys, read), self._visible(self.values, read)

    def move(self, row: int, source: Tensor, target: slice) -> None:
        """Copy slots `source` i64 [A] of a selected sequence to the slots of `target`."""
        for buffer in (self.keys, self.values):
            slots_of_row = buffer[self.book.first + row :: self.book.rows]
            slots_of_row[:, :, target] = slots_of_row.index_select(2, source)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first slots of one sequence to another, both given by their places of R."""
        for buffer in (self.keys, self.values):
            slots = buffer[source :: self.book.rows, :, :length]
            buffer[target :: self.book.rows, :, :length] = slots

    def swap(self, one: int, other: int, lengths: tuple[int, int]) -> None:
        """Exchange the places of two sequences with these numbers of committed slots."""
        for buffer in (self.keys, self.values):
            first, second = buffer[one :: self.book.rows], buffer[other :: self.book.rows]
            copied = first[:, :, : lengths[0]].clone()
            first[:, :, : lengths[1]] = second[:, :, : lengths[1]]
            second[:, :, : lengths[0]] = copied

    def keep(self, places: list[int]) -> None:
        """Keep the sequences at these places of R, in this order; free the memory of others."""
        self.keys = self._every(self.keys)[:, places].flatten(0, 1)
        self.values = self._every(self.values)[:, places].flatten(0, 1)

    def added(self) -> tuple[Tensor, Tensor]:
        """Return keys and values with room for one more sequence at the end."""
        one_row = (0, 0, 0, 0, 0, 0, 0, 1)
        by_copy = map(self._every, (self.keys, self.values))
        keys, values = (pad(buffer, one_row).flatten(0, 1) for buffer in by_copy)
        return keys, values

    def _every(self, buffer: Tensor) -> Tensor:
        """Return a buffer by copy and sequence: [C, R, heads, capacity, width]."""
        return buffer.view(self.book.copies, self.book.rows, *buffer.shape[1:])

    def _active_rows(self, buffer: Tensor) -> Tensor:
        """View the selected rows: [B, heads, capacity, width], of copies [C, B, ...]."""
        book = self.book
        if book.copies == 1:
            return buffer if book.whole else buffer[book.first : book.first + len(book.lengths)]
        return self._every(buffer)[:, book.first : book.first + len(book.lengths)]

    def _by_copy(self, states: Tensor) -> Tensor:
        """Return states [C * B, ...] in the shape of `_active_rows`."""
        copies = self.book.copies
        return states if copies == 1 else states.reshape(copies, -1, *states.shape[1:])

    def _visible(self, buffer: Tensor, read: int) -> Tensor:
        """Return the slots that queries read: [C * B, heads, read, width].

        This is a view, unless there are copies and some sequences are out of line.
        """
        if self.book.whole:
            return buffer[:, :, :read]
        active_rows = self._active_rows(buffer)[..., :read, :]
        return active_rows if self.book.copies == 1 else active_rows.flatten(0, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that n more queries read, and their offset 0."""
        return self.book.read(query_length), 0

    def get_seq_length(self) -> int:
        """Return the slots in use."""
        return self.book.extent

    def get_max_length(self) -> int:
        """Return -1: the buffers grow."""
        return -1

    def _buffer(self, states: Tensor) -> Tensor:
        _, heads, n, width = states.shape
        capacity = max(self.book.capacity, self.book.extent + n)
        return states.new_zeros(self.book.copies * self.book.rows, heads, capacity, width)


class SlotCache(Cache):  # type: ignore[misc, unused-ignore]
    """A transformers cache of slot layers, each created on its first use.

    `select_rows`, `copy`, `length` and `drop` address sequences by their numbers 0 .. R - 1. All
    other methods address the selected ones, in the order that `select_rows` returned.

    Args:
        rows: The number of sequences, R.
        capacity: The initial number of slots.
        copies: Buffer rows of each sequence.
    """

    def __init__(self, rows: int, capacity: int, copies: int = 1) -> None:
        super().__init__(layers=[])
        self.book = SlotBook(rows, capacity, copies)
        self.row_order = list(range(rows))  # the sequence at each place of the buffers
        # The length and hidden slots of each sequence out of line.
        self._aside: list[tuple[int, tuple[int, ...]]] = [(0, (0,) * copies)] * rows

    @property
    def line(self) -> list[int]:
        """The selected sequences, in order."""
        first = self.book.first
        return self.row_order[first : first + len(self.book.lengths)]

    def select_rows(self, rows: Sequence[int]) -> list[int]:
        """Select the sequences of the next forwards; return them in the order of the batch.

        Uncommitted slots are dropped.
        """
        if sorted(rows) != sorted(self.line):
            self._put_aside()
            book, chosen = self.book, set(rows)
            book.first = self._window(chosen)
            here = range(book.first, book.first + len(chosen))
            away = [p for p in range(book.rows) if p not in here and self.row_order[p] in chosen]
            strange = [place for place in here if self.row_order[place] not in chosen]
            for one, other in zip(away, strange, strict=True):
                self._swap(one, other)
            self._recall(len(chosen))
        return self.line

    def length(self, row: int) -> int:
        """Return how many committed slots a sequence has, selected or not."""
        line = self.line
        return self.book.lengths[line.index(row)] if row in line else self._aside[row][0]

    def copy(self, source: int, target: int, length: int) -> None:
        """Replace a sequence by the first committed slots of another, or truncate it itself."""
        self._put_aside()
        self._make(target)
        if source != target and length:
            places = self.row_order.index(source), self.row_order.index(target)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.copy(*places, length)
        self._aside[target] = (length, self._aside[source][1])
        self._recall(len(self.book.lengths))

    def drop(self, rows: Sequence[int]) -> None:
        """Empty these sequences and free their memory. `copy` allocates it again."""
        self._put_aside()
        places = [place for place, row in enumerate(self.row_order) if row not in rows]
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep(places)
        self.row_order = [self.row_order[place] for place in places]
        self.book.rows, self.book.first = len(places), 0
        for row in rows:
            self._aside[row] = (0, (0,) * self.book.copies)
        self._recall(len(places))

    def _make(self, row: int) -> None:
        """Allocate a dropped sequence again."""
        if row not in self.row_order:
            added = [layer.added() if layer.is_initialized else None for layer in self.layers]
            for layer, buffers in zip(self.layers, added, strict=True):  # after all allocations
                if buffers is not None:
                    layer.keys, layer.values = buffers
            self.row_order.append(row)
            self.book.rows += 1

    def discard_uncommitted(self) -> None:
        """Drop uncommitted slots, also those of an interrupted forward."""
        self.book.pending = 0
        self.book.moved()

    def _put_aside(self) -> None:
        """Record the lengths and hidden slots of the selected sequences."""
        self.book.pending = 0
        for row, length, hidden in zip(self.line, self.book.lengths, self.book.hidden, strict=True):
            self._aside[row] = length, hidden

    def _recall(self, count: int) -> None:
        """Select `count` sequences, from the book's first place on."""
        book = self.book
        entries = [self._aside[row] for row in self.row_order[book.first : book.first + count]]
        book.lengths = [length for length, _ in entries]
        book.hidden = [hidden for _, hidden in entries]
        book.moved()

    def _window(self, selection: set[int]) -> int:
        """Return the first place of the window that has most of these sequences already."""
        members = [row in selection for row in self.row_order]
        starts = range(len(members) - len(selection) + 1)
        return max(starts, key=lambda start: sum(members[start : start + len(selection)]))

    def _swap(self, one: int, other: int) -> None:
        row_order = self.row_order
        lengths = self._aside[row_order[one]][0], self._aside[row_order[other]][0]
        for layer in self.layers:
            if layer.is_initialized:
                layer.swap(one, other, lengths)
        row_order[one], row_order[other] = row_order[other], row_order[one]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write into layer `layer_idx`, created on first use; see `SlotLayer.update`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self.book))
        layer: SlotLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def advance(self, n: int) -> None:
        """Count n slots, just written by a forward, as speculative."""
        self.book.pending += n
        self.book.moved()

    def commit(self, accepted: Sequence[Sequence[int]]) -> None:
        """Keep these speculative slots of each row, in ascending order, and drop the others."""
        book = self.book
        for row, slots in enumerate(accepted):
            start = book.lengths[row]
            first = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            if first < len(slots):
                self._move(row, [start + s for s in slots[first:]], start + first)
            book.lengths[row] = start + len(slots)
        book.pending = 0
        book.moved()

    def truncate(self, row: int, length: int) -> None:
        """Keep at most the first `length` committed tokens of a row."""
        self.book.lengths[row] = min(length, self.book.lengths[row])
        self.book.moved()

    def beginning(self, length: int) -> Beginning | None:
        """Return copies of the first slots of all layers; None unless there is one buffer row."""
        layers = [layer for layer in self.layers if layer.is_initialized]
        if not layers or len(layers) < len(self.layers) or layers[0].keys.shape[0] != 1:
            return None
        return [
            (layer.keys[:, :, :length].clone(), layer.values[:, :, :length].clone())
            for layer in layers
        ]

    def begin_with(self, beginning: Beginning) -> None:
        """Replace the contents of the only row by these keys and values."""
        self.book.lengths[0] = self.book.pending = 0
        self.book.moved()
        for index, (keys, values) in enumerate(beginning):
            self.update(keys, values, index)
        self.book.lengths[0] = beginning[0][0].shape[-2] if beginning else 0
        self.book.moved()

    def _move(self, row: int, source: list[int], start: int) -> None:
        target = slice(start, start + len(source))
        index: Tensor | None = None
        for layer in self.layers:
            if layer.is_initialized:
                if index is None or index.device != layer.keys.device:
                    index = torch.tensor(source, device=layer.keys.device)
                layer.move(row, index, target)


def slot_bytes(config: Any, dtype: torch.dtype) -> int:
    """Return the cache bytes per token of a model with this configuration."""
    text = config.get_text_config()
    heads = int(text.num_attention_heads)
    groups = int(getattr(text, "num_key_value_heads", None) or heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    return 2 * int(text.num_hidden_layers) * groups * width * dtype.itemsize


def _grown(buffer: Tensor, needed: int) -> Tensor:
    capacity = buffer.shape[2]
    return pad(buffer, (0, 0, 0, max(needed - capacity, capacity)))
