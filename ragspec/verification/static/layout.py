"""Tree layout on the device: positions, masks and the accepted path, by tensor operations only.

Every function has a fixed number of operations for its shapes and never synchronizes with the host.
So it runs eagerly, under `torch.compile(fullgraph=True)` and inside a captured graph. Each
operation is a kernel launch, so there are few: the ancestors of a query are the bits of one word.

Legend: B rows, n queries per row, S slots of the cache. The root is query 0. The root and all pads
are their own parents.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.supported import AttentionWindow

QUERIES = (1, 4, 8, 16, 32, 64)  # per row, including the root
MOST_QUERIES = QUERIES[-1]
LEAST_SLOTS = 128


def queries_of(count: int) -> int:
    """Return the queries of the smallest step for `count` queries."""
    return next(size for size in QUERIES if size >= count)


def rows_of(count: int, most: int) -> int:
    """Return the rows of the smallest step for `count` rows, at most those of the buffers."""
    return min(1 << (count - 1).bit_length(), most)


def slots_of(count: int, most: int) -> int:
    """Return the slots of the smallest step for `count` slots, at most those of the buffers.

    Sizes are multiples of a quarter of a power of two, so at most a fourth of them is unused.
    """
    if count <= LEAST_SLOTS:
        return min(LEAST_SLOTS, most)
    quarter = 1 << max((count - 1).bit_length() - 3, 0)
    return min(-(-count // quarter) * quarter, most)


def ancestor_bits(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return each query and its ancestors as bits: i64 [B, n] -> i64 [B, n], n at most 64."""
    n = parents.shape[1]
    bits = np.tile(np.left_shift(np.int64(1), np.arange(n)), (len(parents), 1))
    for _ in range((n - 1).bit_length()):  # pointer doubling
        bits |= np.take_along_axis(bits, parents, 1)
        parents = np.take_along_axis(parents, parents, 1)
    return bits


@dataclass(frozen=True, slots=True)
class Counters:
    """The constant tensors of a step shape.

    Attributes:
        powers: Powers of two, i64 [n].
        steps: Numbers from 1, i64 [n].
        slots: Numbers from 0, i64 [S].
        zero, never: Mask entries of allowed and of other slots: 0 and minus infinity.
    """

    powers: Tensor
    steps: Tensor
    slots: Tensor
    zero: Tensor
    never: Tensor

    @classmethod
    def of(cls, n: int, slots: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return the constants of a step, with masks of this dtype."""
        steps, places = (torch.arange(count, device=device) for count in (n, slots))
        zero = torch.zeros((), dtype=dtype, device=device)
        return cls(1 << steps, steps + 1, places, zero, zero - torch.inf)


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of the queries of one step.

    Attributes:
        see: Whether query i attends to query j, that is, itself or an ancestor: bool [B, n, n].
        level: Depth in the tree, 1 for the root, i64 [B, n].
        positions, columns: Positions in the text and slots in the cache, i64 [B, n].
    """

    see: Tensor
    level: Tensor
    positions: Tensor
    columns: Tensor

    def behind(self, lengths: Tensor) -> "Layout":
        """Return the layout of the same trees shifted by `lengths` tokens, i64 [B]."""
        start = lengths[:, None]
        return Layout(self.see, self.level, start + self.positions, start + self.columns)

    def plain_mask(self, last: Tensor, counters: Counters) -> Tensor:
        """Return 0 for slots that a query attends to, else minus infinity: [B, n, S]."""
        behind = (counters.slots <= last[:, None])[:, None].expand(*self.columns.shape, -1)
        mask = torch.where(behind, counters.zero, counters.never)
        tree = torch.where(self.see, counters.zero, counters.never)
        return mask.scatter_(2, self.columns[:, None].expand_as(tree), tree)

    def windowed(self, mask: Tensor, counters: Counters, window: AttentionWindow) -> Tensor:
        """Return the mask [B, n, S] without slots beyond a window."""
        if window.plain:
            return mask
        places = counters.slots.repeat(len(mask), 1).scatter_(1, self.columns, self.positions)
        reached = window.reaches(self.positions[:, :, None], places[:, None])
        return torch.where(reached, mask, counters.never)

    def walk(self, tokens: Tensor, parents: Tensor, chosen: Tensor) -> Tensor:
        """Return the queries on each row's accepted path, including the root: bool [B, n].

        Among siblings with the same token, the one with the longer accepted path counts.

        Args:
            chosen: The target's own token after each query, below 0 if uncertain, i64 [B, n].
        """
        right = chosen.gather(1, parents) == tokens
        live = (self.see[:, :, 1:] <= right[:, None, 1:]).all(-1)
        # A pad is no deeper than the root, which is live and comes first.
        last = (live * self.level).argmax(-1)
        return self.see.gather(1, last[:, None, None].expand(-1, 1, tokens.shape[1]))[:, 0]


def lay_out(above: Tensor, last: Tensor, counters: Counters, columns: Tensor) -> Layout:
    """Return the layout of trees behind committed tokens.

    Args:
        above: See `ancestor_bits`, i64 [B, n].
        last: The slot of the last committed token, i64 [B].
        columns: The output buffer of the layout's columns, i64 [B, n].
    """
    see = (above[:, :, None] & counters.powers) != 0
    level = see.sum(-1)
    torch.add(last[:, None], counters.steps, out=columns)
    return Layout(see, level, last[:, None] + level, columns)


def accepted_first(accepted: Tensor) -> Tensor:
    """Return the queries of each row, accepted ones first: bool [B, n] -> i64 [B, n]."""
    return accepted.byte().sort(dim=-1, descending=True, stable=True).indices
