"""Keys and values of all layers in few buffers at fixed addresses.

A captured step reads and writes fixed addresses, so the buffers outlive their session. The next
session over the same target reuses them and the steps that were captured for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from ragspec.models.device import is_cuda, pins
from ragspec.verification.sequence_cache import SequenceCache


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Shape, dtype and device of the keys, or of the values, of one layer."""

    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


class Stacks:
    """Buffers [m, rows, heads, slots, width], one for all keys and values of one shape.

    Args:
        layers: The shapes of keys and values of each layer.
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
        """The device of the first buffer."""
        return self.buffers[0].device

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer, views [rows, heads, slots, width]."""
        views = [self.buffers[stack][place] for stack, place in self._where]
        return list(zip(views[::2], views[1::2], strict=True))

    def grow(self, more: int) -> None:
        """Add slots to each buffer. If memory runs out, no buffer changes."""
        self.buffers = [torch.nn.functional.pad(each, (0, 0, 0, more)) for each in self.buffers]
        self.slots += more


class StackedRow(SequenceCache):
    """A cache of one sequence in one row of stacks, at fixed addresses."""

    def __init__(self, stacks: Stacks, row: int) -> None:
        super().__init__(stacks.slots)
        self.row = row
        self.bind(stacks)

    def bind(self, stacks: Stacks) -> None:
        """Point the layers at the row of the stacks; again after these have grown."""
        self.capacity, at = stacks.slots, slice(self.row, self.row + 1)
        self._keys = {i: keys[at] for i, (keys, _) in enumerate(stacks.pairs())}
        self._values = {i: values[at] for i, (_, values) in enumerate(stacks.pairs())}

    def fill(self, source: SequenceCache, length: int) -> None:
        """Replace the contents by the first committed slots of another cache."""
        self.length = self.pending = 0
        for layer, (keys, values) in source.layers(length).items():
            self.write(layer, keys, values)
        self.length = length


def reserve(stacks: Stacks, slots: int) -> bool:
    """Grow the stacks to at least `slots` per row; return whether they were reallocated."""
    if slots <= stacks.slots:
        return False
    stacks.grow(max(slots - stacks.slots, stacks.slots))
    return True


class StepLayer(CacheLayerMixin):  # type: ignore[misc, unused-ignore]
    """One layer of a step of fixed shape.

    Args:
        keys, values: Views of the stacks [B, heads, S, width].
        columns: The slots that the step writes, i64 [B, n], one tensor for all layers.
    """

    is_sliding = False
    is_compileable = True

    def __init__(self, keys: Tensor, values: Tensor, columns: Tensor) -> None:
        super().__init__()
        self.keys, self.values, self.columns = keys, values, columns
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the buffers already exist."""

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
        """Return the number of slots S, and their offset 0."""
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        """Return 0: callers always pass positions."""
        return 0

    def get_max_length(self) -> int:
        """Return the number of slots S."""
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
    """Sends values to one tensor repeatedly, through pinned memory that is allocated once.

    Pinning memory for every step would cost more than the copy.

    Args:
        there: The destination, i64, at a fixed address.
    """

    def __init__(self, there: Tensor) -> None:
        self._there = there
        self._here = torch.empty(
            there.shape, dtype=there.dtype, device="cpu", pin_memory=pins(there.device)
        )
        self._values = self._here.numpy()
        self._sent = torch.Event(there.device) if is_cuda(there.device) else None

    def send(self, values: NDArray[np.int64]) -> None:
        """Copy the values asynchronously, after any earlier copy has finished."""
        if self._sent is not None:
            self._sent.synchronize()
        self._values[:] = values
        self._there.copy_(self._here, non_blocking=True)
        if self._sent is not None:
            self._sent.record()
