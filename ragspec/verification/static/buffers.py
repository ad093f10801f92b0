"""Keys and values of all layers in few buffers at fixed addresses.

A captured step reads and writes fixed addresses, so the buffers outlive their session. The next
session over the same target reuses them and the steps that were captured for them.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from ragspec.verification.sequence_cache import Buffers, SequenceCache


class Arena:
    """The keys and values of one session at a time, and the steps that run over them.

    The buffers are [m, rows, heads, slots, width], one for all keys and values of one shape.

    Args:
        layers: Any keys and values [B, heads, n, width] of each layer, for their shapes.

    Attributes:
        caches: The cache of each row.
        steps: The steps by key; see `StepRunner.take`.
        device: That of the first buffer.
        distributions: The `BatchDistribution` of the first rows, by their number.
        states: Hidden states [1, n, H] that steps of draft heads read; None if there are none.
        addresses: A hash of the addresses of the weights that the steps read.
    """

    def __init__(self, layers: Sequence[tuple[Tensor, Tensor]], rows: int, slots: int) -> None:
        states = [each for pair in layers for each in pair]
        self._shapes = [(x.shape[1], x.shape[3], x.dtype, x.device) for x in states]
        self.rows, self.slots = rows, slots
        self.buffers = [
            torch.zeros(count, rows, heads, slots, width, dtype=dtype, device=device)
            for (heads, width, dtype, device), count in Counter(self._shapes).items()
        ]
        self.device = self.buffers[0].device
        self.steps: dict[Hashable, Any] = {}
        self.states: Tensor | None = None
        self.addresses = 0
        self.distributions: dict[int, Any] = {}
        self.caches = [StackedRow(proxy(self), row) for row in range(rows)]
        self._bind()

    @property
    def bytes(self) -> int:
        """The bytes of all keys and values."""
        return sum(buffer.nbytes for buffer in self.buffers)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each layer, views [rows, heads, slots, width]."""
        rest = dict(zip(dict.fromkeys(self._shapes), map(iter, self.buffers), strict=True))
        views = [next(rest[shape]) for shape in self._shapes]
        return list(zip(views[::2], views[1::2], strict=True))

    def reserve(self, slots: int) -> None:
        """Grow the buffers to at least `slots` per row. If memory runs out, no buffer changes."""
        if slots <= self.slots:
            return
        more = max(slots - self.slots, self.slots)
        self.buffers = [torch.nn.functional.pad(each, (0, 0, 0, more)) for each in self.buffers]
        self.slots += more
        self._bind()
        self.discard_steps()

    def discard_steps(self) -> None:
        """Discard the steps, because addresses that they read or write have changed."""
        self.steps.clear()
        self.distributions.clear()

    def _bind(self) -> None:
        pairs = self.pairs()
        for cache in self.caches:
            cache.bind(self.buffers, pairs)


class StackedRow(SequenceCache):
    """A cache of one sequence in one row of an arena, at fixed addresses.

    Args:
        arena: A proxy, so that memory is free as soon as nothing else uses it.
    """

    def __init__(self, arena: Arena, row: int) -> None:
        super().__init__(0)
        self.row, self._arena = row, arena
        self._stacks: list[Tensor] = []

    def bind(self, buffers: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Point the layers at the row of the buffers; again after these have grown."""
        self.buffers, at = Buffers(buffers[0].shape[3]), slice(self.row, self.row + 1)
        self._stacks = [buffer[:, self.row] for buffer in buffers]
        self.buffers.keys = {i: keys[at] for i, (keys, _) in enumerate(pairs)}
        self.buffers.values = {i: values[at] for i, (_, values) in enumerate(pairs)}

    def reserve(self, n: int) -> None:
        """Make room for n new slots, in all rows of the arena."""
        self._arena.reserve(self.extent + n)

    def move(self, source: Tensor, start: int) -> None:
        """Copy slots i64 [n] down to those from `start` on, in all layers at once."""
        for stack in self._stacks:
            stack[:, :, start : start + len(source)] = stack.index_select(2, source)


def compact(buffers: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """Copy slots of the first B rows of every layer: `source` to `target`, i64 [B, n] each."""
    rows = len(source)
    for stack in buffers:
        active_rows = stack[:, :rows]
        shape = (len(stack), rows, stack.shape[2], source.shape[1], stack.shape[4])
        taken = active_rows.gather(3, source[None, :, None, :, None].expand(shape))
        active_rows.scatter_(3, target[None, :, None, :, None].expand(shape), taken)
