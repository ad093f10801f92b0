"""Biases, penalties of the text so far, and minimum lengths, of one text or of a batch.

The counts of a text's tokens grow with it. On the host only the scores of tokens that occur are
computed again. The counts of a batch stay on the device of the logits, [B, V], and grow there by a
scatter of the tokens that a step accepts. The path of a node adds at most n tokens to them, so no
table of [n, V] counts is ever made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_NEVER = float("-inf")
NodePaths = Sequence[Sequence[int]]  # draft tokens between the last committed token and each node


class PenaltyShape(NamedTuple):
    """The kinds of changes of the logits that the texts of a batch need."""

    bias: bool = False
    repetition: bool = False
    counts: bool = False
    minimum: bool = False

    @property
    def reads_texts(self) -> bool:
        """Whether the tokens of the texts matter."""
        return self.repetition or self.counts


@dataclass(eq=False)
class Penalties:
    """The changes of the logits of one text, a processor.

    Attributes:
        bias: Constants that are added to the logits of single tokens, before all else.
        repetition: Divides positive and multiplies negative logits of every token of the text
            (CTRL, arXiv 1909.05858).
        frequency, presence: frequency x count + presence is subtracted from the logits of generated
            tokens, as OpenAI does.
        ends, minimum: Tokens that are forbidden until `minimum` tokens were generated.
        prompt_length: Tokens of the text that were not generated.
        shape: The kinds of these changes.
        counts: How often tokens occur in the text that was counted last, and among its generated
            tokens, i32 [2, V].
        tokens: The distinct tokens that occur in it, i64 [K].
    """

    bias: Mapping[int, float] = field(default_factory=dict)
    repetition: float = 1.0
    frequency: float = 0.0
    presence: float = 0.0
    ends: Sequence[int] = ()
    minimum: int = 0
    prompt_length: int = 0

    lazy = False

    def __post_init__(self) -> None:
        counts = bool(self.frequency or self.presence)
        self.shape = PenaltyShape(bool(self.bias), self.repetition != 1.0, counts, bool(self.ends))
        self._biases = torch.tensor(list(self.bias.values()), dtype=torch.float64)
        self._text: Sequence[int] = ()
        self._length = 0
        self.counts = np.zeros((2, 0), dtype=np.int32)
        self.tokens = np.zeros(0, dtype=np.int64)

    @property
    def forbids(self) -> bool:
        """Whether these changes only forbid tokens, so that their place in a sequence is free."""
        return not self.shape.reads_texts and set(self.bias.values()) <= {_NEVER}

    def apply(self, logits: Tensor, context: Sequence[int], paths: NodePaths) -> Tensor:
        """Return the changed logits [R, V]; see `Processor`."""
        scores, shape = logits, self.shape
        if shape.bias:
            scores, biases = scores.clone(), self._biases.to(scores)
            changed = scores[:, list(self.bias)] + biases  # NaN of infinity that is forbidden
            scores[:, list(self.bias)] = torch.where(biases == _NEVER, _NEVER, changed)
        if shape.reads_texts:
            scores = self._after_text(scores, context, paths)
        least = self.minimum - len(context) + self.prompt_length
        early = [row for row, path in enumerate(paths) if len(path) < least]
        if shape.minimum and early:
            scores = scores.clone()
            # Configurations name other ends, too.
            ends = [end for end in self.ends if 0 <= end < logits.shape[1]]
            scores[torch.tensor(early)[:, None], torch.tensor(ends, dtype=torch.int64)] = _NEVER
        return scores

    def count(self, text: Sequence[int], size: int) -> None:
        """Count the tokens of a text, or only new ones if the same list grew."""
        known = self._length
        if text is not self._text or len(text) < known or size != self.counts.shape[1]:
            self._text, known = text, 0 if self.shape.repetition else self.prompt_length
            self.counts, self.tokens = np.zeros((2, size), dtype=np.int32), self.tokens[:0]
        self._length = len(text)
        if known < len(text):
            new = np.array(text[known:])
            self.tokens = np.concatenate([self.tokens, np.unique(new[self.counts[0, new] == 0])])
            np.add.at(self.counts[0], new, 1)
            np.add.at(self.counts[1], new[max(0, self.prompt_length - known) :], 1)

    def _after_text(self, scores: Tensor, context: Sequence[int], paths: NodePaths) -> Tensor:
        """Return scores [R, V] less the penalties of context and paths."""
        self.count(context, scores.shape[1])
        drafted = list(dict.fromkeys(token for path in paths for token in path))
        # Tokens of both are there twice, with the same score.
        tokens = np.concatenate([self.tokens, drafted]) if drafted else self.tokens
        counts = self.counts[:, None, tokens].repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[:, row] += tokens == token
        numbers = [
            scores.new_full((), self.repetition),
            scores.new_full((), self.frequency, dtype=torch.float32),
            scores.new_full((), self.presence, dtype=torch.float32),
            scores.new_ones(()),
        ]
        # One copy to the device; float32 holds token ids below 2^24.
        flat = counts.reshape(2 * len(paths), len(tokens))
        packed = np.concatenate([tokens[None], flat], dtype=np.float32)
        moved = torch.from_numpy(packed).to(scores.device)
        where = moved[0].long()
        penalties = penalties_of(moved[1:].view(counts.shape), self.shape, numbers)
        return scores.index_copy(1, where, penalised(scores.index_select(1, where), penalties))


class BatchPenalties:
    """The penalties of B texts on the device of the logits, written in place."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device | str) -> None:
        self._bias = torch.zeros(rows, 1, vocab_size, dtype=torch.float32, device=device)
        # The first index of each token, and its counts in the text and among generated tokens; the
        # last count is for `size`, no token.
        self._until = self._bias.to(torch.int64)
        self._held = self._bias.new_zeros(2, rows, 1, vocab_size + 1)
        self._one = self._bias.new_ones(())
        none = self._bias.new_zeros(2, rows, 1, 1)
        self._numbers = torch.ones_like(none[0], dtype=torch.float64), *none

    def set(self, row: int, parts: Sequence[Penalties], text: Sequence[int], start: int) -> None:
        """Write the penalties of a row.

        Args:
            parts: They are applied in this order; all but one of them forbid tokens alone.
            text: Committed tokens of the row.
            start: Length of its prompt.
        """
        bias, until = self._bias[row, 0], self._until[row, 0]
        for buffer in (bias, until):
            buffer.zero_()
        values = 1.0, 0.0, 0.0
        for each in parts:
            bias[list(each.bias)] += each._biases.to(bias)
            ends = [end for end in each.ends if 0 <= end < len(bias)]
            until[ends] = until[ends].clamp(min=each.minimum + each.prompt_length - start)
            if each.shape.reads_texts:
                values = each.repetition, each.frequency, each.presence
                each.count(text, len(bias))
                self._held[:, row, 0, :-1] = torch.from_numpy(each.counts).to(bias.device)
        for number, value in zip(self._numbers, values, strict=True):
            number[row] = value

    def apply(
        self, logits: Tensor, shape: PenaltyShape, indices: Tensor, tokens: Tensor, see: Tensor
    ) -> Tensor:
        """Return the processed scores [B, n, V], f64 for f64 logits and else f32.

        See `BatchDistribution.choose` for the other arguments.
        """
        scores = logits if logits.dtype == torch.float64 else logits.float()
        if shape.bias:
            scores = scores + self._bias
        if shape.reads_texts:
            scores = self._after_texts(scores, shape, tokens, see)
        if shape.minimum:
            scores = scores.clone() if scores is logits else scores
            scores.masked_fill_(indices[..., None] < self._until, _NEVER)
        return scores

    def grow(self, tokens: Tensor) -> None:
        """Add tokens i64 [B, m] to the texts; entries of the vocabulary's size add nothing."""
        where = tokens[:, None].expand(2, -1, -1, -1)
        self._held.scatter_add_(-1, where, self._one.expand_as(where))

    def _after_texts(
        self, scores: Tensor, shape: PenaltyShape, tokens: Tensor, see: Tensor
    ) -> Tensor:
        """Return scores [B, n, V] less the penalties of each node's text.

        Equal tokens of a tree get equal scores, so the order of writing them does not matter.
        """
        n, size = scores.shape[1:]
        held = self._held[..., :size]
        if n > 1:  # else there is only the root, which is part of the text
            same = tokens[:, 1:, None] == tokens[:, None]
            below = (see[:, :, 1:, None] & same[:, None]).sum(2)  # [B, n, n]: on a node's path
            few = held.gather(-1, tokens[:, None].expand(2, -1, -1, -1)) + below
            # Both at once, as each operation is a kernel launch.
            held = torch.cat((held, few.flatten(-2)[..., None, :]), -1)
        exact, *others = self._numbers
        gains = penalties_of(held, shape, [exact.to(scores.dtype), *others, self._one])
        whole = penalised(scores, [each if each is None else each[..., :size] for each in gains])
        if n > 1:
            where = tokens[:, None].expand(-1, n, -1)
            paths = [each if each is None else each[..., size:].view(-1, n, n) for each in gains]
            whole.scatter_(-1, where, penalised(scores.gather(-1, where), paths))
        return whole


def penalties_of(
    counts: Tensor, shape: PenaltyShape, numbers: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return divisors of the scores and amounts to subtract, [..., K] each, None if unused.

    Args:
        counts: How often tokens occur in the text, and among those generated [2, ..., K].
        numbers: The penalties of repetition, in the dtype of the scores, of frequency and of
            presence, and the number 1.
    """
    (repetition, frequency, presence, one), occurs = numbers, counts > 0
    by = torch.where(occurs[0], repetition, one) if shape.repetition else None
    return [by, frequency * counts[1] + presence * occurs[1] if shape.counts else None]


def penalised(scores: Tensor, penalties: Sequence[Tensor | None]) -> Tensor:
    """Return the scores [..., K] after what `penalties_of` returned."""
    by, less = penalties
    if by is not None:
        scores = torch.where(scores < 0, scores * by, over(scores, by))
    return scores if less is None else scores - less


def over(scores: Tensor, by: float | Tensor) -> Tensor:
    """Return scores / by, a tensor rounded as if it were a Python number.

    On CUDA that kernel multiplies by the reciprocal.
    """
    return scores * by.reciprocal() if isinstance(by, Tensor) and scores.is_cuda else scores / by
