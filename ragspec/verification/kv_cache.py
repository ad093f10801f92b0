"""The slot cache: keys and values in buffers that are written in place and never concatenated.

Row b owns slots 0 .. capacity. Slots below `lengths[b]` hold committed tokens, slot = position.
Above them lie up to `pending` speculative slots, filled by one or more forwards and then either
kept (the accepted ones move down to close the gaps) or forgotten. Sliding and chunked layers keep
every slot too: their window is enforced by the mask, so that no draft that is
forgotten takes a key along.

A sequence may own several rows of the buffers, its *copies* (guidance runs a model on a pair): with
R sequences, copy c of sequence b is buffer row c * R + b. Lengths are those of sequences.

A forward covers the sequences *in line*, B of the R, which lie in one batch so that their keys are
one view. All are at first; `line_up` chooses others, and moves as few of them as it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ragspec.verification.base import Beginning


class SlotBook:
    """What all layers of one cache share: lengths of the rows in line and the speculative region.

    rows: R, those out of line included. first: where in the buffers those in line begin.
    """

    def __init__(self, rows: int, capacity: int, copies: int = 1) -> None:
        self.rows = rows
        self.first = 0
        self.lengths = [0] * rows
        self.pending = 0
        self.capacity = capacity
        self.copies = copies
        # First slots of each row, by copy, that they alone see: a prompt's padding.
        self.hidden: list[tuple[int, ...]] = [(0,) * copies] * rows
        self.block = 1  # keys are read in whole blocks of so many slots, after the prompt
        self._places: tuple[int, Tensor, Tensor] | None = None

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

    @property
    def whole(self) -> bool:
        """Whether all rows are in line."""
        return len(self.lengths) == self.rows

    def places(self, n: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return where the next n tokens go: buffer rows i64 [C * B, 1], slots i64 [C * B, n]."""
        if self._places is None or self._places[0] != n:
            starts = torch.tensor(self.lengths * self.copies, device=device) + self.pending
            rows = torch.arange(self.copies, device=device)[:, None] * self.rows + self.first
            rows = (rows + torch.arange(len(self.lengths), device=device)).reshape(-1, 1)
            self._places = (n, rows, starts[:, None] + torch.arange(n, device=device))
        return self._places[1].to(device), self._places[2].to(device)

    def moved(self) -> None:
        """Forget what was derived from the lengths; call after every change of them."""
        self._places = None


class SlotLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer's keys and values: [C * R, heads, capacity, width], grown by doubling."""

    is_sliding = False
    is_croppable = True

    def __init__(self, book: SlotBook) -> None:
        super().__init__()
        self.book = book

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the buffers; head counts and widths are read off the first states."""
        self.keys = self._buffer(key_states)
        self.values = self._buffer(value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
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
        if read > self.values.shape[-2]:  # asked apart: memory may have ended between the two
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
        """Copy slots `source` i64 [A] of a sequence in line to the slots of `target`."""
        for buffer in (self.keys, self.values):
            slots_of_row = buffer[self.book.first + row :: self.book.rows]
            slots_of_row[:, :, target] = slots_of_row.index_select(2, source)

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first slots of one sequence to another; both by their places of R."""
        for buffer in (self.keys, self.values):
            current, other = buffer[source :: self.book.rows], buffer[target :: self.book.rows]
            other[:, :, :length] = current[:, :, :length]

    def swap(self, one: int, other: int, lengths: tuple[int, int]) -> None:
        """Let two sequences change places; lengths: the committed slots of each."""
        for buffer in (self.keys, self.values):
            first, second = buffer[one :: self.book.rows], buffer[other :: self.book.rows]
            copied = first[:, :, : lengths[0]].clone()
            first[:, :, : lengths[1]] = second[:, :, : lengths[1]]
            second[:, :, : lengths[0]] = copied

    def keep(self, places: Sequence[int]) -> None:
        """Keep the sequences at these places of R, in that order, and free the memory of others."""
        rows = list(places)
        self.keys = self._every(self.keys)[:, rows].flatten(0, 1)
        self.values = self._every(self.values)[:, rows].flatten(0, 1)

    def added(self) -> tuple[Tensor, Tensor]:
        """Return keys and values with room for one more sequence behind the others."""
        results = []
        for buffer in (self.keys, self.values):
            by_copy = self._every(buffer)
            more = by_copy.new_zeros(by_copy.shape[0], 1, *by_copy.shape[2:])
            results.append(torch.cat([by_copy, more], 1).flatten(0, 1))
        return results[0], results[1]

    def _every(self, buffer: Tensor) -> Tensor:
        """Return a buffer by copy and sequence: [C, R, heads, capacity, width]."""
        return buffer.view(self.book.copies, self.book.rows, *buffer.shape[1:])

    def _active_rows(self, buffer: Tensor) -> Tensor:
        """Return what lies in line, a view: [B, heads, capacity, width], of copies [C, B, ...]."""
        book = self.book
        if book.copies == 1:
            return buffer if book.whole else buffer[book.first : book.first + len(book.lengths)]
        return self._every(buffer)[:, book.first : book.first + len(book.lengths)]

    def _by_copy(self, states: Tensor) -> Tensor:
        """Return states [C * B, ...] in the shape of `_active_rows`."""
        copies = self.book.copies
        return states if copies == 1 else states.reshape(copies, -1, *states.shape[1:])

    def _visible(self, buffer: Tensor, read: int) -> Tensor:
        """Return the slots that queries see: [C * B, heads, read, width].

        A view, but of copies of which some are out of line.
        """
        if self.book.whole:
            return buffer[:, :, :read]
        active_rows = self._active_rows(buffer)[..., :read, :]
        return active_rows if self.book.copies == 1 else active_rows.flatten(0, 1)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of slots that n more queries see, and their offset 0."""
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
    """A transformers cache of slot layers, made as the model asks for them.

    rows: sequences, R. capacity: slots to begin with. copies: buffer rows of each sequence.
    Sequences go by their numbers 0 .. R - 1 in `line_up`, `copy` and `length`, wherever they lie;
    all other methods are about those in line, in the order that `line_up` returned.
    """

    def __init__(self, rows: int, capacity: int, copies: int = 1) -> None:
        super().__init__(layers=[])
        self.book = SlotBook(rows, capacity, copies)
        self._row_order = list(range(rows))  # the sequence at each place of the buffers
        # Of each sequence out of line its length and hidden slots.
        self._aside: list[tuple[int, tuple[int, ...]]] = [(0, (0,) * copies)] * rows

    @property
    def line(self) -> list[int]:
        """The sequences in line, in order."""
        first = self.book.first
        return self._row_order[first : first + len(self.book.lengths)]

    def line_up(self, rows: Sequence[int]) -> list[int]:
        """Let the next forwards cover these sequences; return them in the order in which they lie.

        What was not committed is forgotten.
        """
        if sorted(rows) != sorted(self.line):
            self._put_aside()
            book, chosen = self.book, set(rows)
            book.first = self._window(chosen)
            here = range(book.first, book.first + len(chosen))
            away = [p for p in range(book.rows) if p not in here and self._row_order[p] in chosen]
            strange = [place for place in here if self._row_order[place] not in chosen]
            for one, other in zip(away, strange, strict=True):
                self._swap(one, other)
            self._recall(len(chosen))
        return self.line

    def length(self, row: int) -> int:
        """Return how many committed slots a sequence has, in line or not."""
        line = self.line
        return self.book.lengths[line.index(row)] if row in line else self._aside[row][0]

    def copy(self, source: int, target: int, length: int) -> None:
        """Let a sequence hold the first committed slots of another, or of itself, and no more."""
        self._put_aside()
        self._make(target)
        if source != target and length:
            places = self._row_order.index(source), self._row_order.index(target)
            for layer in self.layers:
                if layer.is_initialized:
                    layer.copy(*places, length)
        self._aside[target] = (length, self._aside[source][1])
        self._recall(len(self.book.lengths))

    def drop(self, rows: Sequence[int]) -> None:
        """Give up the memory of these sequences, which then hold nothing; `copy` takes it again."""
        self._put_aside()
        places = [place for place, row in enumerate(self._row_order) if row not in rows]
        for layer in self.layers:
            if layer.is_initialized:
                layer.keep(places)
        self._row_order = [self._row_order[place] for place in places]
        self.book.rows, self.book.first = len(places), 0
        for row in rows:
            self._aside[row] = (0, (0,) * self.book.copies)
        self._recall(len(places))

    def _make(self, row: int) -> None:
        """Give a sequence a place in the buffers, where it was dropped."""
        if row not in self._row_order:
            added = [layer.added() if layer.is_initialized else None for layer in self.layers]
            for layer, buffers in zip(self.layers, added, strict=True):  # all of them, or none
                if buffers is not None:
                    layer.keys, layer.values = buffers
            self._row_order.append(row)
            self.book.rows += 1

    def abandon(self) -> None:
        """Forget what was not committed, also of a forward that was broken off."""
        self.book.pending = 0
        self.book.moved()

    def _put_aside(self) -> None:
        """Note what is known of those in line."""
        self.book.pending = 0
        known = zip(self.book.lengths, self.book.hidden, strict=True)
        for row, current in zip(self.line, known, strict=True):
            self._aside[row] = current

    def _recall(self, count: int) -> None:
        """Put so many in line, from the book's first place on, with what is known of them."""
        book = self.book
        results = [self._aside[row] for row in self._row_order[book.first : book.first + count]]
        book.lengths, book.hidden = (
            [length for length, _ in results],
            [hidden for _, hidden in results],
        )
        book.moved()

    def _window(self, selection: set[int]) -> int:
        """Return the place from which on most of these sequences lie in one batch already."""
        current = [row in selection for row in self._row_order]
        starts = range(len(current) - len(selection) + 1)
        return max(starts, key=lambda start: sum(current[start : start + len(selection)]))

    def _swap(self, one: int, other: int) -> None:
        row_order = self._row_order
        lengths = self._aside[row_order[one]][0], self._aside[row_order[other]][0]
        for layer in self.layers:
            if layer.is_initialized:
                layer.swap(one, other, lengths)
        row_order[one], row_order[other] = row_order[other], row_order[one]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write into layer `layer_idx`, made on first use; see `SlotLayer.update`."""
        while len(self.layers) <= layer_idx:
            self.layers.append(SlotLayer(self.book))
        layer: SlotLayer = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def advance(self, n: int) -> None:
        """Count n slots, just written by a forward, as speculative."""
        self.book.pending += n
        self.book.moved()

    def commit(self, selected: Sequence[Sequence[int]]) -> None:
        """Keep, for each row, these of its speculative slots (ascending) and drop the others."""
        book = self.book
        for row, slots in enumerate(selected):
            start = book.lengths[row]
            first = next((i for i, slot in enumerate(slots) if slot != i), len(slots))
            if first < len(slots):
                self._move(row, [start + s for s in slots[first:]], start + first)
            book.lengths[row] = start + len(slots)
        book.pending = 0
        book.moved()

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
        index: Tensor | None = None
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


def _grown(buffer: Tensor, needed: int) -> Tensor:
    batch, heads, capacity, width = buffer.shape
    grown = buffer.new_zeros(batch, heads, max(needed, 2 * capacity), width)
    grown[:, :, :capacity] = buffer
    return grown
