"""Trees laid out on the device: ancestors, positions, masks and the walk, by tensors alone.

Every function has a fixed number of operations for its shapes and asks the host nothing, so that
it runs eagerly, under `torch.compile(fullgraph=True)` and inside a captured graph alike.

Legend: B rows, n queries of each (the root is query 0 and its own parent; a pad is its own parent,
too), S slots of the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ragspec.models.layer_windows import Window


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the queries of one step stand.

    see bool [B, n, n]: query j is query i or above it. depth, positions, columns i64 [B, n]: below
    the root, in the text, and among the slots.
    """

    see: torch.Tensor
    depth: torch.Tensor
    positions: torch.Tensor
    columns: torch.Tensor

    def behind(self, lengths: torch.Tensor) -> Layout:
        """Return the layout of the same trees behind so many more tokens: lengths i64 [B]."""
        start = lengths[:, None]
        return Layout(self.see, self.depth, start + self.positions, start + self.columns)


def lay_out(parents: torch.Tensor, lengths: torch.Tensor) -> Layout:
    """Return the layout of trees behind committed tokens: parents i64 [B, n], lengths i64 [B]."""
    n = parents.shape[1]
    steps = torch.arange(n, device=parents.device)
    see = (steps[:, None] == steps).expand(len(parents), n, n)
    for _ in range((n - 1).bit_length()):  # pointer doubling
        see = see | see.gather(1, parents[:, :, None].expand(-1, -1, n))
        parents = parents.gather(1, parents)
    depth = see.sum(-1) - 1
    start = lengths[:, None]
    return Layout(see, depth, start + depth, start + steps)


def allowed(layout: Layout, lengths: torch.Tensor, slots: int, window: Window) -> torch.Tensor:
    """Return which slots each query attends to: bool [B, n, S]."""
    columns = torch.arange(slots, device=lengths.device)
    n = layout.see.shape[1]
    behind = columns - lengths[:, None]
    own = behind.clamp(0, n - 1)
    tree = layout.see.gather(2, own[:, None].expand(-1, n, -1)) & (behind < n)[:, None]
    seen = (behind < 0)[:, None] | tree
    if window.plain:
        return seen
    places = torch.where(behind < 0, columns, layout.positions.gather(1, own))
    return seen & window.reaches(layout.positions[:, :, None], places[:, None])


def additive(seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return 0 where a slot is seen, else minus infinity: bool [B, n, S] -> [B, 1, n, S]."""
    mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return mask.masked_fill(~seen, float("-inf"))[:, None]


def walk(
    layout: Layout, tokens: torch.Tensor, parents: torch.Tensor, chosen: torch.Tensor
) -> torch.Tensor:
    """Return the queries on each row's accepted path, the root among them: bool [B, n].

    tokens, parents i64 [B, n]; chosen i64 [B, n]: the target's own token after each query. Of equal
    siblings the one with the longer accepted path counts.
    """
    steps = torch.arange(tokens.shape[1], device=tokens.device)
    right = (chosen.gather(1, parents) == tokens) | (steps == 0)
    live = layout.see[:, :, 0] & ~(layout.see & ~right[:, None]).any(-1)
    last = (live * (layout.depth + 1)).argmax(-1)
    return layout.see.gather(1, last[:, None, None].expand(-1, 1, len(steps)))[:, 0]


def first_to_last(kept: torch.Tensor) -> torch.Tensor:
    """Return the kept queries of each row, ascending, then n: bool [B, n] -> i64 [B, n]."""
    n = kept.shape[1]
    steps = torch.arange(n, device=kept.device)
    return torch.where(kept, steps, n).sort(-1).values
