"""The sequences of one forward: their caches, and what their tokens attend to.

A forward over several sequences is packed: their tokens follow each other in one row of the model,
without padding. Each sequence attends to its own buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ragspec.verification.reading import Taps
from ragspec.verification.sequence_cache import KeysValues, SequenceCache


@dataclass(frozen=True, slots=True)
class TreeView:
    """The layout of one sequence in a forward, from which its mask is computed.

    B is 1, or the copies of a sequence whose padding differs.

    Attributes:
        length: Committed slots.
        positions: Logical positions of the queries, i64 [B, n].
        slot_positions: Logical positions of the m speculative slots, the queries last, i64 [B, m].
        related: The speculative slots that each query attends to (itself and its ancestors), bool
            [B, n, m]. None if the rows are chains.
        hidden: First slots of each row that no other query attends to, i64 [B]; see `hide_padding`.
    """

    length: int
    positions: Tensor
    slot_positions: Tensor
    related: Tensor | None
    hidden: Tensor | None = None

    @property
    def slots(self) -> int:
        """The number of cache slots that the queries read."""
        return self.length + self.slot_positions.shape[1]


def hide_padding(view: TreeView, counts: Sequence[int]) -> TreeView:
    """Return the view with the first `counts` slots of each row, a prompt's padding, masked.

    Each masked slot attends to itself only, so that its softmax is defined.
    """
    hidden = torch.tensor(counts, device=view.positions.device)
    related = view.related
    rows, n = view.positions.shape
    if related is None:
        chain = torch.ones(n, view.slot_positions.shape[1], dtype=torch.bool, device=hidden.device)
        related = chain.tril(chain.shape[1] - n).expand(rows, -1, -1)
    slots = view.length + torch.arange(related.shape[2], device=hidden.device)
    related = related & ((slots[-n:, None] == slots) | (slots >= hidden[:, None])[:, None])
    return replace(view, related=related, hidden=hidden)


class Batch:
    """The sequences of one forward, in the order of their tokens.

    Args:
        rows: The cache of each sequence.
        views: The view of each sequence alone.
        taps: Where a target that runs alone records hidden states; None to record none.

    Attributes:
        counts: The tokens of each sequence.
    """

    def __init__(
        self, rows: Sequence[SequenceCache], views: Sequence[TreeView], taps: Taps | None = None
    ) -> None:
        self.rows, self.views, self.taps = rows, views, taps
        self.counts = [view.positions.shape[1] for view in views]
        for row, count in zip(rows, self.counts, strict=True):
            row.reserve(count)
        self._parts: dict[int, tuple[Tensor, list[KeysValues]]] = {}
        self._masks: dict[int, tuple[Tensor, list[Tensor | None]]] = {}

    @property
    def extent(self) -> int:
        """Slots in use, of all sequences together."""
        return sum(row.extent for row in self.rows)

    @property
    def positions(self) -> Tensor:
        """Logical positions of all tokens, i64 [1, N]."""
        return torch.cat([view.positions for view in self.views], 1)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> KeysValues:
        """Write the new slots of layer `layer_idx`; see `SequenceCache.write`.

        Of several sequences the new states return, by which `parts` finds the slots of each.
        """
        if len(self.rows) == 1:
            return self.rows[0].write(layer_idx, key_states, value_states)
        new = (torch.split(states, self.counts, 2) for states in (key_states, value_states))
        pairs = zip(self.rows, *new, strict=True)
        parts = [row.write(layer_idx, key, value) for row, key, value in pairs]
        self._parts[id(key_states)] = key_states, parts
        return key_states, value_states

    def parts(self, key: Tensor) -> list[KeysValues]:
        """Return keys and values of each sequence, in the layer that returned `key`.

        Raises:
            KeyError: The model has changed the keys before it attends.
        """
        return self._parts[id(key)][1]

    def note(self, masks: list[Tensor | None]) -> Tensor | None:
        """Record the masks of several sequences; return the tensor that stands for them, if any."""
        if all(mask is None for mask in masks):
            return None
        # NaN, so that the load-time probe sees a model that uses it as a mask.
        mark = torch.full((1, 1, 1, 1), float("nan"), device=self.views[0].positions.device)
        self._masks[id(mark)] = mark, masks
        return mark

    def masks(self, mark: Tensor | None) -> list[Tensor | None]:
        """Return the mask of each sequence.

        Raises:
            KeyError: The model has changed the mask.
        """
        return [None] * len(self.rows) if mark is None else self._masks[id(mark)][1]

    def advance(self) -> None:
        """Count the new slots as speculative, once the forward has ended."""
        self._parts.clear()
        for row, count in zip(self.rows, self.counts, strict=True):
            row.pending += count
