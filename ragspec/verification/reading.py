"""Long prompts are read in pieces, one forward each, so that somebody can be told how far it is.

The pieces lie one behind the other in the speculative slots of the cache and are committed
together, as if there had been one forward; each attends to those before it. Activations and masks
are as large as a piece asks for and not as the prompt does: that is why accelerators read in pieces
too, of a size at which a forward takes far longer than its launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from ragspec.verification.tree_attention import TreeView

PIECE = 512  # tokens that a CPU reads at once
LARGE_PIECE = 2048  # and an accelerator
LONG = 256  # tokens of a chain whose ancestors are not worth a table of n x n
States = torch.Tensor | None
Forward = Callable[[torch.Tensor, TreeView, int | torch.Tensor], tuple[torch.Tensor, States]]
OnRead = Callable[[int, int], None]


def piece_of(device: torch.device) -> int:
    """Return how many tokens of a prompt a device reads at once."""
    return PIECE if device.type == "cpu" else LARGE_PIECE


def chunks(n: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the beginnings and ends of n tokens cut into even pieces of at most `most`."""
    count = -(-n // most)
    for i in range(count):
        yield i * n // count, (i + 1) * n // count


def in_chunks(view: TreeView, most: int | None) -> bool:
    """Tell whether a forward can be cut: it is long, and its rows are chains."""
    plain = view.related is None and not view.unused
    return most is not None and plain and view.positions.shape[1] > most


def read_in_chunks(
    forward: Forward,
    tokens: torch.Tensor,
    view: TreeView,
    keep: int | torch.Tensor,
    most: int,
    on_read: OnRead | None,
) -> tuple[torch.Tensor, States]:
    """Return what `forward` would of all tokens i64 [B, n], read `most` at a time.

    keep: the number of last queries whose logits are wanted, or i64 [k], ascending. on_read: called
    with how many tokens have been read and of how many, first with 0. Returns logits [B, k, V] and,
    where the forward gives them, states [C, B, k, H].
    """
    n = tokens.shape[1]
    selection = torch.arange(n - keep, n) if isinstance(keep, int) else keep
    logits: list[torch.Tensor] = []
    states: list[torch.Tensor] = []
    if on_read is not None:
        on_read(0, n)
    for start, end in chunks(n, most):
        current = selection[(selection >= start) & (selection < end)] - start
        part = replace(
            view,
            positions=view.positions[:, start:end],
            slot_positions=view.slot_positions[:, :end],
        )
        result, hidden = forward(tokens[:, start:end], part, current if len(current) else 1)
        if len(current):
            logits.append(result)
            states += [] if hidden is None else [hidden]
        if on_read is not None:
            on_read(end, n)
    return torch.cat(logits, 1), torch.cat(states, 2) if states else None
