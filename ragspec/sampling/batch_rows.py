"""Processors and stopping criteria that transformers made for a batch, as those of its rows.

transformers calls them once a step with all rows of a batch, padding included; some count that
padding, hold a part for each row, or remember what they were called with. The engine decodes rows
of different lengths at a pace of their own, so each row gets what is its own, and is shown what
transformers would show of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ragspec.errors import InputError
from ragspec.sampling.processors import copied


class BatchRows:
    """The rows of one call as transformers has them, and the texts that the engine makes of them.

    ids i64 [R, T], mask [R, T] or None: R = B * n rows, n of each prompt. shared: what copies of
    processors have in common.
    """

    def __init__(
        self, ids: torch.Tensor, mask: torch.Tensor | None, n: int, shared: Sequence[Any]
    ) -> None:
        self.ids, self.n, self.shared = ids, n, shared
        self._lengths = [ids.shape[1]] * len(ids) if mask is None else mask.bool().sum(1).tolist()

    def whole(self, row: int, ids: torch.Tensor) -> torch.Tensor:
        """Return what transformers has in the place of the engine's ids i64 [1, T'] of a row."""
        new = ids[:, self._lengths[row] :]
        return torch.cat([self.ids[row : row + 1].to(ids.device), new], dim=1)


@dataclass(frozen=True)
class RowProcessors:
    """Processors of a batch, as those of its single rows."""

    rows: BatchRows
    processors: Sequence[Any]

    def of_row(self, row: int) -> Any:
        """Return a processor that gives the row's own ones what transformers gives them."""
        memo = {id(thing): thing for thing in self.rows.shared}
        current = list(self.processors)
        if len(self.rows.ids) > 1:
            current = [_of_row(each, row, self.rows, memo) for each in current]

        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            whole = self.rows.whole(row, ids)
            for processor in current:
                scores = processor(whole, scores)
            return scores

        return process


@dataclass(frozen=True)
class RowCriterion:
    """A stopping criterion of a batch, asked about its single rows."""

    rows: BatchRows
    criterion: Any

    def of_row(self, row: int) -> Any:
        """Return a criterion that gives this one what transformers gives it."""
        return lambda ids, scores: self.criterion(self.rows.whole(row, ids), scores)


def _of_row(processor: Any, row: int, rows: BatchRows, memo: dict[int, Any]) -> Any:
    """Return a processor of one row, with that row's part of what transformers made for all."""
    kind, prompt = type(processor).__name__, row // rows.n
    if kind == "PrefixConstrainedLogitsProcessor":
        allowed = processor._prefix_allowed_tokens_fn
        return type(processor)(lambda _, ids: allowed(row, ids), 1)
    current: Any = copied(processor, memo)
    if kind == "RepetitionPenaltyLogitsProcessor" and torch.is_tensor(current.prompt_ignore_length):
        current.prompt_ignore_length = current.prompt_ignore_length[row : row + 1]
    elif kind == "EncoderRepetitionPenaltyLogitsProcessor":
        current.encoder_input_ids = current.encoder_input_ids[prompt : prompt + 1]
    elif kind == "EncoderNoRepeatNGramLogitsProcessor":
        current.batch_size, current.generated_ngrams = (
            1,
            current.generated_ngrams[prompt : prompt + 1],
        )
    elif kind == "UnbatchedClassifierFreeGuidanceLogitsProcessor":
        context, prompts = current.unconditional_context, len(rows.ids) // rows.n
        for name in ("input_ids", "attention_mask"):
            if (inputs := context[name]) is not None:
                context[name] = _one_of(inputs, prompt, prompts)
    return current


def _one_of(negative: torch.Tensor, prompt: int, prompts: int) -> torch.Tensor:
    """Return the negative prompt [1, T] of one prompt, out of one for each or one for all."""
    if len(negative) not in (1, prompts):
        raise InputError(
            f"got {len(negative)} rows of negative_prompt_ids for {prompts} prompts; expected one "
            "for each, or one for all"
        )
    return negative if len(negative) == 1 else negative[prompt : prompt + 1]
