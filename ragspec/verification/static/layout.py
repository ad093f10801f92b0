"""Trees laid out on the device: positions, masks and the walk, by tensors alone.

Every function has a fixed number of operations for its shapes and asks the host nothing, so that
it runs eagerly, under `torch.compile(fullgraph=True)` and inside a captured graph alike. As each
operation is a launch there are few: ancestors come as the bits of one word for each query.

Legend: B rows, n queries of each (the root is query 0 and its own parent; a pad is its own parent,
too), S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ragspec.models.supported import AttentionWindow

QUERIES = (1, 4, 8, 16, 32, 64)  # of each row, the root included
MOST_QUERIES = QUERIES[-1]
LEAST_SLOTS = 128


def queries_of(count: int) -> int:
    """Return the queries of the least step that holds `count`."""
    return next(size for size in QUERIES if size >= count)


def rows_of(count: int, most: int) -> int:
    """Return the rows of the least step that holds `count`, at most those of the buffers."""
    return min(1 << (count - 1).bit_length(), most)


def slots_of(count: int, most: int) -> int:
    """Return the slots of the least step that holds `count`, at most those of the buffers.

    Steps of a quarter of a power of two: at most a fourth is read in vain.
    """
    if count <= LEAST_SLOTS:
        return min(LEAST_SLOTS, most)
    quarter = 1 << max((count - 1).bit_length() - 3, 0)
    return min(-(-count // quarter) * quarter, most)


def ancestor_bits(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return which queries each query is or stands below, by bits: i64 [B, n] -> i64 [B, n].

    n is 64 at most.
    """
    n = parents.shape[1]
    bits = np.tile(np.left_shift(np.int64(1), np.arange(n)), (len(parents), 1))
    for _ in range((n - 1).bit_length()):  # pointer doubling
        bits |= np.take_along_axis(bits, parents, 1)
        parents = np.take_along_axis(parents, parents, 1)
    return bits


@dataclass(frozen=True, slots=True)
class Counters:
    """What a shape counts by, made once: powers of two i64 [n], steps from 1 on i64 [n], slots from
    0 on i64 [S], and what a mask holds where a slot is seen and where not.
    """

    powers: Tensor
    steps: Tensor
    slots: Tensor
    zero: Tensor
    never: Tensor

    @classmethod
    def of(cls, n: int, slots: int, dtype: torch.dtype, device: torch.device) -> Self:
        """Return those of steps of n queries over so many slots, with masks of a dtype."""
        steps = torch.arange(n, device=device)
        zero = torch.zeros((), dtype=dtype, device=device)
        return cls(
            1 << steps, steps + 1, torch.arange(slots, device=device), zero, zero - torch.inf
        )


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the queries of one step stand.

    see bool [B, n, n]: query j is query i or above it. level, positions, columns i64 [B, n]: tokens
    from the root on, itself among them; place in the text; and among the slots.
    """

    see: Tensor
    level: Tensor
    positions: Tensor
    columns: Tensor

    def behind(self, lengths: Tensor) -> Layout:
        """Return the layout of the same trees behind so many more tokens: lengths i64 [B]."""
        start = lengths[:, None]
        return Layout(self.see, self.level, start + self.positions, start + self.columns)


def lay_out(above: Tensor, last: Tensor, counters: Counters, columns: Tensor) -> Layout:
    """Return the layout of trees behind committed tokens.

    above i64 [B, n]: see `ancestor_bits`. last i64 [B]: the slot of the last committed token.
    columns i64 [B, n]: where to write the layout's.
    """
    see = (above[:, :, None] & counters.powers) != 0
    level = see.sum(-1)
    torch.add(last[:, None], counters.steps, out=columns)
    return Layout(see, level, last[:, None] + level, columns)


def plain_mask(layout: Layout, last: Tensor, counters: Counters) -> Tensor:
    """Return 0 where a query attends to a slot, else minus infinity: [B, n, S]."""
    behind = (counters.slots <= last[:, None])[:, None].expand(*layout.columns.shape, -1)
    mask = torch.where(behind, counters.zero, counters.never)
    current = torch.where(layout.see, counters.zero, counters.never)
    return mask.scatter_(2, layout.columns[:, None].expand_as(current), current)


def windowed(mask: Tensor, layout: Layout, counters: Counters, window: AttentionWindow) -> Tensor:
    """Return the mask [B, n, S] less what lies beyond a window."""
    if window.plain:
        return mask
    slots = counters.slots.repeat(len(mask), 1)
    places = slots.scatter_(1, layout.columns, layout.positions)
    reached = window.reaches(layout.positions[:, :, None], places[:, None])
    return torch.where(reached, mask, counters.never)


def step_mask(layout: Layout, last: Tensor, counters: Counters, window: AttentionWindow) -> Tensor:
    """Return the additive mask [B, 1, n, S]; last i64 [B]: see `lay_out`."""
    return windowed(plain_mask(layout, last, counters), layout, counters, window)[:, None]


def walk(layout: Layout, tokens: Tensor, parents: Tensor, chosen: Tensor) -> Tensor:
    """Return the queries on each row's accepted path, the root among them: bool [B, n].

    tokens, parents i64 [B, n]; chosen i64 [B, n]: the target's own token after each query, below 0
    where it is not known. Of equal siblings the one with the longer accepted path counts.
    """
    right = chosen.gather(1, parents) == tokens
    live = (layout.see[:, :, 1:] <= right[:, None, 1:]).all(-1)
    # A pad is no deeper than the root, which is live and comes first.
    last = (live * layout.level).argmax(-1)
    return layout.see.gather(1, last[:, None, None].expand(-1, 1, tokens.shape[1]))[:, 0]


def accepted_first(accepted: Tensor) -> Tensor:
    """Return the queries of each row, the kept ones first: bool [B, n] -> i64 [B, n]."""
    return accepted.byte().sort(dim=-1, descending=True, stable=True).indices
