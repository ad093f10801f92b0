"""The caches of the sequences of one forward, together.

A forward over several sequences is packed: their tokens follow each other in one row of the model,
without padding. Each sequence attends to its own buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ragspec.verification.sequence_cache import SequenceCache


class BatchCache:
    """The caches of the sequences of one forward.

    Attributes:
        rows: The sequences, in the order of their tokens.
        counts: The tokens of each in the forward; one sequence has all.
    """

    def __init__(self, rows: Sequence[SequenceCache], counts: Sequence[int] = ()) -> None:
        self.rows = list(rows)
        self.counts = list(counts)
        for row, count in zip(self.rows, self.counts, strict=False):
            row.reserve(count)
        self._parts: dict[int, tuple[Tensor, list[tuple[Tensor, Tensor]]]] = {}

    @property
    def extent(self) -> int:
        """Slots in use, of all sequences together."""
        return sum(row.extent for row in self.rows)

    @property
    def packed(self) -> bool:
        """Whether `parts` has the slots of each sequence."""
        return len(self.rows) > 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int
    ) -> tuple[Tensor, Tensor]:
        """Write the new slots of layer `layer_idx`; see `SequenceCache.write`.

        Of several sequences the new states return, by which `parts` finds the slots of each.
        """
        if not self.packed:
            return self.rows[0].write(layer_idx, key_states, value_states)
        keys = torch.split(key_states, self.counts, 2)
        values = torch.split(value_states, self.counts, 2)
        new = zip(self.rows, keys, values, strict=True)
        parts = [row.write(layer_idx, key, value) for row, key, value in new]
        self._parts[id(key_states)] = key_states, parts
        return key_states, value_states

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
