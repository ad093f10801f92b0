"""The caches of the sequences of one forward, together.

A forward over several sequences is packed: their tokens follow each other in one row of the model,
without padding. Each sequence attends to its own buffers, and shared slots are attended to once for
all that share them (see `tree_attention`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ragspec.verification.sequence_cache import SequenceCache, SlotRange


class SharedPart(NamedTuple):
    """Slots that the tokens of some sequences of a forward all attend to.

    Attributes:
        part: The slots.
        first: The position of the first of them.
        rows: The sequences.
    """

    part: SlotRange
    first: int
    rows: list[int]


def shared_parts(rows: Sequence[SequenceCache]) -> tuple[list[SharedPart], list[int]]:
    """Return the parts of a forward, and how many first slots of each sequence lie in them.

    A part belongs to the sequences that begin with the same slots of the same buffers. A sequence
    that shares with none attends to the buffers that it writes at once.
    """
    parts: list[SharedPart] = []
    ends = [0] * len(rows)
    groups = [list(range(len(rows)))] if any(row.parts for row in rows) else []
    while groups:
        alike: dict[int, tuple[SlotRange, list[int]]] = {}
        for i in groups.pop():
            part = _part_at(rows[i], ends[i])
            known, members = alike.setdefault(id(part.buffers), (part, []))
            alike[id(part.buffers)] = min(known, part, key=lambda each: each.end), [*members, i]
        for part, members in alike.values():
            first = ends[members[0]]
            if part.start < part.end and (
                len(members) > 1 or part.buffers is not rows[members[0]].tail
            ):
                parts.append(SharedPart(part, first, members))
                for i in members:
                    ends[i] += part.end - part.start
                groups.append(members)
    return parts, ends


def _part_at(row: SequenceCache, slot: int) -> SlotRange:
    """Return the slots from `slot` on that lie in the same buffers."""
    first = 0
    for buffers, _, end in row.parts:
        if slot < first + end:
            return SlotRange(buffers, slot - first, end)
        first += end
    return SlotRange(row.tail, slot - first, row.length - first)


class BatchCache:
    """The caches of the sequences of one forward.

    Attributes:
        rows: The sequences, in the order of their tokens.
        counts: The tokens of each in the forward; one sequence has all.
        shared, starts: See `shared_parts`.
        index: The tokens of the sequences of each shared part, i64 [n]; None for all.
    """

    def __init__(self, rows: Sequence[SequenceCache], counts: Sequence[int] = ()) -> None:
        self.rows = list(rows)
        self.counts = list(counts)
        for row, count in zip(self.rows, self.counts, strict=False):
            row.reserve(count)
        self.shared, self.starts = shared_parts(self.rows)
        self.index = [self._tokens_of(rows) for _, _, rows in self.shared]
        self._parts: dict[int, tuple[Tensor, int, list[tuple[Tensor, Tensor]]]] = {}

    @property
    def extent(self) -> int:
        """Slots in use, of all sequences together."""
        return sum(row.extent for row in self.rows)

    @property
    def packed(self) -> bool:
        """Whether `parts` has the slots of each sequence."""
        return len(self.rows) > 1 or bool(self.shared)

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
        parts = [
            row.write(layer_idx, key, value, start)
            for row, start, key, value in zip(self.rows, self.starts, keys, values, strict=True)
        ]
        self._parts[id(key_states)] = key_states, layer_idx, parts
        return key_states, value_states

    def parts(self, key: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of each sequence, in the layer that returned `key`.

        Those of `shared` parts are not among them.

        Raises:
            KeyError: The model has changed the keys before it attends.
        """
        return self._parts[id(key)][2]

    def shared_slots(self, key: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of the `shared` parts, in the layer that returned `key`."""
        layer = self._parts[id(key)][1]
        return [part.buffers.slots(layer, part.start, part.end) for part, _, _ in self.shared]

    def _tokens_of(self, rows: Sequence[int]) -> Tensor | None:
        """Return the places of the tokens of some sequences; None for all."""
        if len(rows) == len(self.rows):
            return None
        ends = list(accumulate(self.counts, initial=0))
        places = [place for row in rows for place in range(ends[row], ends[row + 1])]
        return torch.tensor(places)

    def advance(self, n: int) -> None:
        """Count the slots of a forward over n tokens as speculative."""
        self._parts.clear()
        for row, count in zip(self.rows, self.counts or [n], strict=True):
            row.advance(count)
