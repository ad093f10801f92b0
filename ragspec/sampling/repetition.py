"""Ending a text that has begun to say the same again and again, as greedy small models do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

ROUNDS, LEAST, LONGEST = 3, 24, 96  # times that something stands in a row; its tokens in all; each


def repeats(tokens: Sequence[int]) -> bool:
    """Tell whether a text ends with a cycle of at most 96 tokens, three rounds or more of it."""
    last = len(tokens) - 1
    for period in range(1, min(LONGEST, len(tokens) // ROUNDS) + 1):
        if tokens[last] != tokens[last - period]:
            continue
        span = max(period * ROUNDS, LEAST)
        first = len(tokens) - span
        if first >= 0 and tokens[first + period :] == tokens[first : len(tokens) - period]:
            return True
    return False


@dataclass(frozen=True, slots=True)
class EndRepetition:
    """A stopping criterion, for `stopping_criteria`: the text ends once it repeats itself.

    prompt: tokens before the text.
    """

    prompt: int

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> bool:
        """Tell whether the text of ids i64 [1, T] has come to its third round."""
        known = max(self.prompt, ids.shape[1] - LONGEST * ROUNDS)
        return repeats(ids[0, known:].tolist())
