"""The rows of a batch of transformers' `generate`, for processors and criteria of single texts.

Processors that keep state for all rows are copied, each copy with the state of its row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ragspec.errors import InputError, pluralize
from ragspec.sampling.processors import HFCallable, copied, criterion_of_text, of_transformers
from ragspec.sampling.stopping import Criterion


class BatchRows:
    """The rows of one call as transformers has them, padding included.

    Args:
        ids, mask: Token ids i64 [R, T] and their mask [R, T] or None, of R = B * n rows.
        n: Rows of each prompt.
        shared: Objects that copies of processors share.
    """

    def __init__(self, ids: Tensor, mask: Tensor | None, n: int, shared: Sequence[object]) -> None:
        self.ids, self.n, self.shared = ids, n, shared
        self._lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(1).tolist()

    def whole(self, row: int, ids: Tensor) -> Tensor:
        """Return a row's ids as transformers has them, from the engine's ids i64 [1, T']."""
        new = ids[:, self._lengths[row] :]
        return torch.cat([self.ids[row : row + 1].to(ids.device), new], dim=1)


@dataclass(frozen=True)
class RowProcessors:
    """Makes the processors of single rows from those of a batch."""

    rows: BatchRows
    processors: Sequence[Any]

    def of_row(self, row: int) -> HFCallable:
        """Return a processor that calls the row's processors with the ids of transformers."""
        memo = {id(thing): thing for thing in self.rows.shared}
        processors = list(self.processors)
        if len(self.rows.ids) > 1:
            processors = [_of_row(each, row, self.rows, memo) for each in processors]

        def process(ids: Tensor, scores: Tensor) -> Tensor:
            whole = self.rows.whole(row, ids)
            for processor in processors:
                scores = processor(whole, scores)
            return scores

        # Errors name a function by this.
        process.__qualname__ = ", ".join(type(each).__name__ for each in processors)
        process.of_transformers = all(map(of_transformers, processors))  # type: ignore[attr-defined]
        return process


@dataclass(frozen=True)
class RowCriterion:
    """Makes the stopping criterion of single rows from that of a batch."""

    rows: BatchRows
    criterion: Any

    def of_row(self, row: int) -> Criterion:
        """Return a criterion that calls the batch's one with the ids of transformers."""
        memo, alone = {id(thing): thing for thing in self.rows.shared}, len(self.rows.ids) == 1
        criterion = self.criterion if alone else criterion_of_text(self.criterion, memo)
        return lambda ids, scores: criterion(self.rows.whole(row, ids), scores)


def _of_row(processor: Any, row: int, rows: BatchRows, memo: dict[int, object]) -> Any:
    """Return a processor of one row, with that row's part of the state for all rows."""
    kind, prompt = type(processor).__name__, row // rows.n
    if kind == "PrefixConstrainedLogitsProcessor":
        number = row // processor._num_beams  # since 5.24 the rows of a prompt, before 1
        return type(processor)(lambda _, ids: processor._prefix_allowed_tokens_fn(number, ids), 1)
    copy: Any = copied(processor, memo)
    if kind == "RepetitionPenaltyLogitsProcessor" and torch.is_tensor(copy.prompt_ignore_length):
        copy.prompt_ignore_length = copy.prompt_ignore_length[row : row + 1]
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        copy.encoder_input_ids = copy.encoder_input_ids[prompt : prompt + 1]
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        copy.batch_size, copy.generated_ngrams = 1, copy.generated_ngrams[prompt : prompt + 1]
    elif kind == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
        context, prompts = copy.unconditional_context, len(rows.ids) // rows.n
        for name in ("input_ids", "attention_mask"):
            if (inputs := context[name]) is not None:
                context[name] = _one_of(inputs, prompt, prompts)
    return copy


def _one_of(negative: Tensor, prompt: int, prompts: int) -> Tensor:
    """Return the negative prompt [1, T] of one prompt, from one for each or one for all."""
    if len(negative) not in (1, prompts):
        raise InputError(
            f"got {pluralize(len(negative), 'row')} of negative_prompt_ids for "
            f"{pluralize(prompts, 'prompt')}; expected one for each, or one for all"
        )
    return negative if len(negative) == 1 else negative[prompt : prompt + 1]
