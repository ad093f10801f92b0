"""Keys and values of all layers in few buffers, which stay where they are between texts.

A captured step reads and writes fixed addresses, so that the buffers outlive the session that uses
them: the next one over the same target finds them, and the steps captured for them, as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ragspec.models.device import is_cuda, pins
from ragspec.verification.kv_cache import SlotCache, SlotLayer

Change = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What the keys, or the values, of one layer are."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


class Stacks:
    """Buffers [m, rows, heads, slots, width], one for all keys and values of one shape.

    layers: the shapes of keys and values, layer by layer.
    """

    def __init__(
        self, layers: Sequence[tuple[LayerShape, LayerShape]], rows: int, slots: int
    ) -> None:
        flat = [shape for pair in layers for shape in pair]
        places: dict[LayerShape, list[int]] = {}
        for number, shape in enumerate(flat):
            places.setdefault(shape, []).append(number)
        self.rows, self.slots = rows, slots
        self.buffers = [
            torch.zeros(len(numbers), rows, s.heads, slots, s.width, dtype=s.dtype, device=s.device)
            for s, numbers in places.items()
        ]
        self._where = [(-1, -1)] * len(flat)
        for stack, numbers in enumerate(places.values()):
            for place, number in enumerate(numbers):
                self._where[number] = (stack, place)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.buffers[0].device

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer, views [rows, heads, slots, width]."""
        results = [self.buffers[stack][place] for stack, place in self._where]
        return list(zip(results[::2], results[1::2], strict=True))

    def change(self, change: Change) -> None:
        """Put what `change` makes of each buffer in its place; all of them, or none."""
        self.buffers = [change(buffer) for buffer in self.buffers]
        self.rows, self.slots = self.buffers[0].shape[1], self.buffers[0].shape[3]


class StackedCache(SlotCache):
    """A slot cache whose layers are views of stacks.

    rows: sequences, R, which are the first rows of the stacks. Those in line begin at the first
    place always, so that a step finds them at one address.
    """

    def __init__(self, stacks: Stacks, rows: int) -> None:
        super().__init__(rows, stacks.slots)
        self.stacks = stacks
        self._bind()

    @property
    def row_order(self) -> list[int]:
        """The sequence at each place of the buffers."""
        return self._row_order

    def reserve(self, slots: int) -> bool:
        """Make room for so many slots in each row; tell whether the buffers had to move."""
        if slots <= self.stacks.slots:
            return False
        more = max(slots, 2 * self.stacks.slots) - self.stacks.slots
        self.stacks.change(lambda old: torch.nn.functional.pad(old, (0, 0, 0, more)))
        self._bind()
        return True

    def drop(self, rows: Sequence[int]) -> None:
        """Forget what these sequences hold; their memory stays, as steps were captured over it."""
        self._put_aside()
        for row in rows:
            self._aside[row] = (0, (0,))
        self._recall(len(self.book.lengths))

    def _window(self, selection: set[int]) -> int:
        return 0

    def _bind(self) -> None:
        """Let the layers read and write the stacks as they are now."""
        rows = self.book.rows
        self.book.capacity = self.stacks.slots
        self.layers = []
        for keys, values in self.stacks.pairs():
            layer = SlotLayer(self.book)
            layer.keys, layer.values = keys[:rows], values[:rows]
            layer.is_initialized = True
            self.layers.append(layer)


class StepLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer as a step of fixed shape sees it: [B, heads, S, width].

    columns i64 [B, n]: the slots that the step writes, one tensor for all layers.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.columns = keys, values, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers are there."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the n new slots in place, and return all S: two views [B, heads, S, width]."""
        for buffer, states in ((self.keys, key_states), (self.values, value_states)):
            if len(buffer) == 1:
                buffer.index_copy_(2, self.columns[0], states)
            else:
                at = self.columns[:, None, :, None].expand_as(states)
                buffer.scatter_(2, at, states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the slots that queries see, and their offset 0."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return 0: positions are always given."""
        return 0

    def get_max_length(self) -> int:
        """Return the slots that there are."""
        return int(self.keys.shape[2])


def step_cache(stacks: Stacks, rows: int, slots: int, columns: Tensor) -> Cache:
    """Return the cache of a step: the first rows and slots of the stacks."""
    return Cache(
        layers=[
            StepLayer(keys[:rows, :, :slots], values[:rows, :, :slots], columns)
            for keys, values in stacks.pairs()
        ]
    )


def compact(stacks: Stacks, source: Tensor, target: Tensor) -> None:
    """Copy slots of the first B rows of every layer: `source` to `target`, i64 [B, n] each."""
    rows = len(source)
    for stack in stacks.buffers:
        active_rows = stack[:, :rows]
        shape = (len(stack), rows, stack.shape[2], source.shape[1], stack.shape[4])
        taken = active_rows.gather(3, source[None, :, None, :, None].expand(shape))
        active_rows.scatter_(3, target[None, :, None, :, None].expand(shape), taken)


class Staging:
    """What is sent to one tensor, again and again; there: i64, whose address stays.

    Pinned memory is taken once: to pin some for each step costs more than the copy.
    """

    def __init__(self, there: Tensor) -> None:
        self._there = there
        self._here = torch.empty(
            there.shape, dtype=there.dtype, device="cpu", pin_memory=pins(there.device)
        )
        self._values = self._here.numpy()
        self._sent = torch.Event(there.device) if is_cuda(there.device) else None

    def send(self, values: NDArray[np.int64]) -> None:
        """Write the values; waits only where those sent before are still on their way."""
        if self._sent is not None:
            self._sent.synchronize()
        self._values[:] = values
        self._there.copy_(self._here, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
