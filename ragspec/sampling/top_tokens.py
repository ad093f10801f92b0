"""The largest scores of a vocabulary, and the target's best tokens for drafters that learn.

Every node needs its largest scores, so finding them has to be cheap. Measured on a CPU, 37 rows of
8,192: torch's argmax takes 0.4 ms in float32 and 1.1 ms in bfloat16, NumPy's 0.02 and (with a copy)
0.04. A vocabulary is never sorted: the k largest values lie in the k blocks of largest maximum.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import isfinite

import numpy as np
import torch
from torch import Tensor

from ragspec.trees.draft_tree import Ints

BLOCK = 64
SMALL = 1 << 18  # number of scores below which a plain top-k is faster (measured between forwards)
_HALVES = (torch.bfloat16, torch.float16)


def best_token(scores: Tensor) -> Tensor:
    """Return the place of the largest score, the first among equals: [..., V] -> i64 [...]."""
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    return torch.from_numpy(np.asarray(_widened(scores).numpy().argmax(-1)))


def sure_tokens(scores: Tensor) -> list[int]:
    """Return `sure_token(best_token(scores), scores)` of scores [N, V] on a CPU, sooner."""
    array = _widened(scores).numpy()
    best = enumerate(array.argmax(-1).tolist())
    return [token if isfinite(array.item(i, token)) else -1 for i, token in best]


def sure_token(tokens: Tensor, scores: Tensor) -> Tensor:
    """Return the tokens i64 [...], -1 where their scores [..., V] are not finite."""
    values = scores.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]
    return torch.where(values.isfinite(), tokens, -1)


def best_tokens(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the largest scores, best first, and their places: [..., V] -> two [..., min(k, V)]."""
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
    values = head.gather(-2, held[..., None].expand(*held.shape, BLOCK)).flatten(-2)
    inside = torch.arange(BLOCK, device=held.device)
    places = torch.add(inside, held[..., None], alpha=BLOCK).flatten(-2)
    if blocks * BLOCK < size:
        rest = torch.arange(blocks * BLOCK, size, device=held.device)
        values = torch.cat((values, scores[..., blocks * BLOCK :]), -1)
        places = torch.cat((places, rest.expand(*places.shape[:-1], -1)), -1)
    values, best = values.topk(k, -1)
    return values.to(kind), places.gather(-1, best)


def _widened(scores: Tensor) -> Tensor:
    """Return scores of half precision in float32, for which CPU kernels are faster."""
    scores = scores.detach()
    return scores.float() if scores.dtype in _HALVES else scores


LATE = 1 << 17  # most scores whose search may wait on a CPU: several steps at once take less time


class _Forward:
    """The best tokens of all rows of a forward i64 [N, k]; `host` is their only copy.

    Args:
        scores: The scores [N, V], searched when a token is read; the tokens themselves if k is 0.
    """

    def __init__(self, scores: Tensor, k: int = 0) -> None:
        self._scores, self._k = scores, k

    @cached_property
    def best(self) -> Tensor:
        scores: Tensor = self.__dict__.pop("_scores")  # frees them after their only use
        return best_tokens(scores, self._k)[1] if self._k else scores

    @cached_property
    def host(self) -> Ints:
        return self.best.cpu().numpy()


@dataclass(frozen=True, slots=True, eq=False)
class TopTokens:
    """The best tokens i64 [n, k] of one row of a forward, best first; its length is n.

    They stay on the target's device until they are read on the host; the rows of a forward then
    share one copy.
    """

    forward: _Forward
    start: int
    count: int

    def __len__(self) -> int:
        return self.count

    @classmethod
    def of(cls, best: Tensor) -> "TopTokens":
        """Return the best tokens [n, k] of a single row."""
        return cls(_Forward(best), 0, len(best))

    @classmethod
    def ranked(
        cls, logits: Sequence[Tensor], k: int, counts: Sequence[int], selected: bool
    ) -> "list[TopTokens]":
        """Return the k best tokens of the first `counts` positions of each row's logits [n, V].

        Args:
            selected: No processor changes the logits, so on a CPU the search may wait for a reader.
        """
        late = logits[0].device.type == "cpu" and sum(each.numel() for each in logits) <= LATE
        if selected and late:
            return [cls(_Forward(each, k), 0, n) for each, n in zip(logits, counts, strict=True)]
        parts = [each[:n] for each, n in zip(logits, counts, strict=True)]
        best = best_tokens(parts[0] if len(parts) == 1 else torch.cat(parts), k)[1]
        forward, starts = _Forward(best), [0, *accumulate(counts)]
        return [cls(forward, start, n) for start, n in zip(starts, counts, strict=False)]

    def there(self) -> Tensor:
        """Return the tokens on the target's device: i64 [n, k]."""
        return self.forward.best[self.start : self.start + self.count]

    def host(self) -> Ints:
        """Return the tokens on the host: i64 [n, k], read-only."""
        return self.forward.host[self.start : self.start + self.count]
