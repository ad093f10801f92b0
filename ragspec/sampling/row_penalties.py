"""Penalties of the texts of all rows, on the device of the logits.

The counts of tokens in each row's text stay on the device, [B, V], and grow there by a scatter of
the tokens that a step accepts. A node's own path adds at most n tokens to them. Only the scores of
these are computed again and put in place, so that no table of [n, V] counts is ever made. The
scores are those of `processors`, which stay the reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.processors import (
    CountPenalty,
    MinimumLength,
    Processor,
    RepetitionPenalty,
    TokenBias,
)

_ENDS = 16  # most end tokens of a row that a minimum length forbids
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class PenaltyShape:
    """The kinds of changes of the logits that the rows of a batch need."""

    bias: bool = False
    repetition: bool = False
    counts: bool = False
    ends: bool = False

    @property
    def nothing(self) -> bool:
        """Whether the logits stay as they are."""
        return not (self.bias or self.ends or self.texts)

    @property
    def texts(self) -> bool:
        """Whether the tokens of the texts matter."""
        return self.repetition or self.counts

    @classmethod
    def of(cls, distributions: Sequence[TokenDistribution | None]) -> PenaltyShape:
        """Return the shape of rows with these distributions."""
        kinds = {
            type(each)
            for distribution in distributions
            if distribution is not None
            for each in distribution.processors
        }
        ordered = (TokenBias, RepetitionPenalty, CountPenalty, MinimumLength)
        return cls(*(kind in kinds for kind in ordered))


def known(processors: Sequence[Processor]) -> bool:
    """Return whether `RowPenalties` has the effect of these processors in sequence.

    Processors that only forbid tokens may stand anywhere; the others at most once, in one order.
    """
    kinds = [type(each) for each in processors if not _forbids(each)]
    order = [kind for kind in (TokenBias, RepetitionPenalty, CountPenalty) if kind in kinds]
    late = {end for each in processors if isinstance(each, MinimumLength) for end in each.ends}
    return kinds == order and len(late) <= _ENDS


class RowPenalties:
    """Bias, repetition and count penalties and minimum lengths of B rows, written in place."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        def numbers(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        self._bias = numbers(rows, 1, vocab_size)
        # Counts in the text, and among generated tokens; the last entry is for `size`, no token.
        self._held = numbers(2, rows, 1, vocab_size + 1)
        self._one = torch.ones((), device=device)
        self._repetition = numbers(rows, 1, 1, kind=torch.float64) + 1.0
        self._rounded = self._repetition.float()  # divides scores in single precision
        self._frequency, self._presence = numbers(2, rows, 1, 1)
        self._ends = numbers(rows, 1, _ENDS, kind=torch.int64)
        self._until = numbers(rows, 1, _ENDS, kind=torch.int64)

    def set(self, row: int, distribution: TokenDistribution | None, text: Sequence[int]) -> None:
        """Write the penalties of a row's distribution; `text` are its tokens, the root last."""
        for buffer in (self._bias, self._frequency, self._presence):
            buffer[row] = 0
        self._repetition[row] = self._rounded[row] = 1.0
        until: dict[int, int] = {}
        start = 0 if distribution is None else distribution.prompt_length
        for each in () if distribution is None else distribution.processors:
            if isinstance(each, TokenBias):
                where = each.tokens.to(self._bias.device)
                self._bias[row, 0, where] += each.values.to(self._bias)
            elif isinstance(each, RepetitionPenalty):
                self._repetition[row] = self._rounded[row] = each.penalty
                self._held[0, row, 0, :-1] = self._counts(text)
            elif isinstance(each, CountPenalty):
                self._frequency[row], self._presence[row] = each.frequency, each.presence
                self._held[1, row, 0, :-1] = self._counts(text[each.prompt_length :])
            elif isinstance(each, MinimumLength):
                least = each.minimum + each.prompt_length - start
                until |= {end: max(least, until.get(end, 0)) for end in each.ends}
        self._forbid(row, until)

    def apply(
        self, logits: Tensor, shape: PenaltyShape, indices: Tensor, tokens: Tensor, see: Tensor
    ) -> Tensor:
        """Return the processed scores [B, n, V], f64 for f64 logits and else f32.

        See `BatchDistribution.choose` for the other arguments.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if shape.bias:
            scores = scores + self._bias
        if shape.texts:
            scores = self._penalised_paths(scores, shape, tokens, see)
        if shape.ends:
            where = self._ends.expand(*indices.shape, -1)
            early = indices[..., None] < self._until
            ends = scores.gather(-1, where).masked_fill(early, _NEVER)
            if scores is logits:  # the caller's logits stay as they are
                scores = scores.clone()
            scores.scatter_(-1, where, ends)
        return scores

    def grow(self, tokens: Tensor) -> None:
        """Add tokens i64 [B, m] to the texts; entries of the vocabulary's size add nothing."""
        where = tokens[:, None].expand(2, -1, -1, -1)
        self._held.scatter_add_(-1, where, self._one.expand_as(where))

    def _penalised_paths(
        self, scores: Tensor, shape: PenaltyShape, tokens: Tensor, see: Tensor
    ) -> Tensor:
        """Return scores [B, n, V] less the penalties of each node's text.

        Equal tokens of a tree get equal scores, so the order of writing them does not matter.
        """
        n, size = scores.shape[1:]
        held = self._held[..., :size]
        if n == 1:  # the root is part of the text
            return self._penalised(scores, *self._gain(held, shape, scores.dtype))
        same = tokens[:, 1:, None] == tokens[:, None]
        below = (see[:, :, 1:, None] & same[:, None]).sum(2)  # [B, n, n]: on a node's path
        few = held.gather(-1, tokens[:, None].expand(2, -1, -1, -1)) + below
        # Both at once, as each operation is a kernel launch.
        by, less = self._gain(
            torch.cat((held, few.flatten(-2)[..., None, :]), -1), shape, scores.dtype
        )
        where = tokens[:, None].expand_as(below)
        paths = [each if each is None else each[..., size:].view(-1, n, n) for each in (by, less)]
        whole = [each if each is None else each[..., :size] for each in (by, less)]
        put = self._penalised(scores.gather(-1, where), *paths)
        return self._penalised(scores, *whole).scatter_(-1, where, put)

    def _gain(
        self, held: Tensor, shape: PenaltyShape, kind: torch.dtype
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return divisors of the scores and amounts to subtract, [B, 1, K] each, None if unused.

        `held` [2, B, 1, K] are the counts of tokens, and `kind` is the dtype of the scores.
        """
        by = less = None
        visible = held > 0
        if shape.repetition:
            exact = self._repetition if kind == torch.float64 else self._rounded
            by = torch.where(visible[0], exact, self._one)
        if shape.counts:
            less = self._frequency * held[1] + self._presence * visible[1]
        return by, less

    def _penalised(self, scores: Tensor, by: Tensor | None, less: Tensor | None) -> Tensor:
        """Return the scores [B, n, K] divided by `by`, less `less`, see `_gain`."""
        if by is not None:
            scores = torch.where(scores < 0, scores * by, over(scores, by))
        return scores if less is None else scores - less

    def _counts(self, text: Sequence[int]) -> Tensor:
        ids = torch.tensor(text, dtype=torch.int64)
        return torch.bincount(ids, minlength=self._bias.shape[-1]).to(self._bias)

    def _forbid(self, row: int, until: dict[int, int]) -> None:
        """Forbid each token below its generated index; repeats of them fill the buffer."""
        inside = {end: at for end, at in until.items() if 0 <= end < self._bias.shape[-1]}
        ends = list(inside.items()) or [(0, 0)]
        table = torch.tensor((ends * _ENDS)[:_ENDS])
        self._ends[row, 0], self._until[row, 0] = table.T.to(self._ends.device)


def over(scores: Tensor, by: Tensor) -> Tensor:
    """Return scores / by, rounded as if `by` were a Python number.

    On CUDA that kernel multiplies by the reciprocal.
    """
    quotient: Tensor = scores * by.reciprocal() if scores.is_cuda else scores / by
    return quotient


def _forbids(processor: Processor) -> bool:
    """Return whether a processor only sets scores to -inf, where all others leave them."""
    if type(processor) is TokenBias:
        return bool((processor.values == _NEVER).all())
    return type(processor) is MinimumLength
