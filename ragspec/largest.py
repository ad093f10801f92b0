"""The largest scores of a vocabulary: asked for at every node, so they have to be cheap.

Measured on a CPU, 37 rows of 8,192: torch's argmax takes 0.4 ms in float32 and 1.1 ms in bfloat16,
NumPy's 0.02 and (with a copy) 0.04. A vocabulary is never sorted: the k largest values lie in the
k blocks of largest maximum.
"""

from __future__ import annotations

import numpy as np
import torch

BLOCK = 64
SMALL = 1 << 18  # scores below which a plain top-k is the faster one (measured between forwards)
_HALVES = (torch.bfloat16, torch.float16)


def best_token(scores: torch.Tensor) -> torch.Tensor:
    """Return the place of the largest score, the first among equals: [..., V] -> i64 [...]."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(np.asarray(_widened(scores).numpy().argmax(-1)))


def best_tokens(scores: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k largest scores and their places, best first: [..., V] -> two [..., k].

    Where V is less than k, all V of them.
    """
    size = scores.shape[-1]
    k = min(k, size)
    blocks = size // BLOCK
    if scores.numel() < SMALL or blocks < 2 * k:
        values, places = scores.topk(k, -1)
        return values, places
    kind = scores.dtype
    if scores.device.type == "cpu":
        scores = _widened(scores)
    head = scores[..., : blocks * BLOCK].reshape(*scores.shape[:-1], blocks, BLOCK)
    held = head.amax(-1).topk(k, -1).indices
    where = held[..., None].expand(*held.shape, BLOCK)
    values = head.gather(-2, where).flatten(-2)
    places = (held[..., None] * BLOCK + torch.arange(BLOCK, device=held.device)).flatten(-2)
    if blocks * BLOCK < size:
        rest = torch.arange(blocks * BLOCK, size, device=held.device)
        values = torch.cat((values, scores[..., blocks * BLOCK :]), -1)
        places = torch.cat((places, rest.expand(*places.shape[:-1], -1)), -1)
    values, best = values.topk(k, -1)
    return values.to(kind), places.gather(-1, best)


def _widened(scores: torch.Tensor) -> torch.Tensor:
    """Return scores of half precision in single, for which a CPU has the faster kernels."""
    scores = scores.detach()
    return scores.float() if scores.dtype in _HALVES else scores
