"""Changes of the logits that depend on the text so far, for any node of a tree.

A `Processor` sees the logits of R nodes and, for each, the draft tokens between the last
committed token and that node. The common ones are batched; every transformers LogitsProcessor is
taken as it is by `HFProcessor`, one node at a time in the order in which plain decoding calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ragspec.errors import InputError
from ragspec.sampling.settings import Sampling

HFCallable = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class ByRow(Protocol):
    """Makes a processor or a criterion for each of several texts."""

    def of_row(self, row: int) -> Any:
        """Return the callable for text number `row` of the call: prompt * n + sample."""


class Processor(Protocol):
    """Changes logits by the text so far.

    Attributes:
        lazy: Whether it gets one row at a time, visited nodes only, in order.
    """

    lazy: bool

    def apply(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return logits f32 [R, V]; row r follows `context` and then `paths[r]`."""


class RepetitionPenalty:
    """Divide positive and multiply negative logits of every token seen (CTRL, 1909.05858)."""

    lazy = False

    def __init__(self, penalty: float) -> None:
        self.penalty = penalty

    def apply(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the penalised logits [R, V]."""
        visible = torch.zeros(logits.shape[1], dtype=torch.bool)
        visible[torch.tensor(context)] = True
        mask = visible.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            mask[row, list(path)] = True
        scaled = torch.where(logits < 0, logits * self.penalty, logits / self.penalty)
        return torch.where(mask.to(logits.device), scaled, logits)


class CountPenalty:
    """Subtract frequency x count + presence from tokens generated so far (OpenAI's penalties)."""

    lazy = False

    def __init__(self, frequency: float, presence: float, prompt_length: int) -> None:
        self.frequency = frequency
        self.presence = presence
        self.prompt_length = prompt_length

    def apply(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the penalised logits [R, V]."""
        base = torch.bincount(
            torch.tensor(context[self.prompt_length :], dtype=torch.int64),
            minlength=logits.shape[1],
        )
        counts = base.repeat(len(paths), 1)
        for row, path in enumerate(paths):
            for token in path:
                counts[row, token] += 1
        counts = counts.to(logits.device)
        return logits - (self.frequency * counts + self.presence * (counts > 0))


class TokenBias:
    """Add a constant to the logits of single tokens."""

    lazy = False

    def __init__(self, bias: Mapping[int, float]) -> None:
        self.tokens = torch.tensor(list(bias), dtype=torch.int64)
        self.values = torch.tensor(list(bias.values()))

    def apply(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the biased logits [R, V]."""
        out = logits.clone()
        out[:, self.tokens] += self.values.to(out)
        return out


class MinimumLength:
    """Forbid the end tokens until enough tokens were generated."""

    lazy = False

    def __init__(self, minimum: int, ends: Sequence[int], prompt_length: int) -> None:
        self.minimum = minimum
        self.ends = list(ends)
        self.prompt_length = prompt_length

    def apply(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return logits [R, V] with the end tokens at -inf where it is too early for them."""
        generated = len(context) - self.prompt_length
        early = [row for row, path in enumerate(paths) if generated + len(path) < self.minimum]
        if not early:
            return logits
        out = logits.clone()
        ends = [end for end in self.ends if 0 <= end < logits.shape[1]]  # configs name others, too
        out[torch.tensor(early)[:, None], torch.tensor(ends, dtype=torch.int64)] = float("-inf")
        return out


class HFProcessor:
    """Any transformers LogitsProcessor, stateful or not."""

    lazy = True

    def __init__(self, processor: HFCallable) -> None:
        self.processor = processor

    def apply(
        self, logits: Tensor, context: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> Tensor:
        """Return the scores [R, V] after the processor, which gets ids [1, T] and scores [1, V]."""
        rows = [
            self.processor(
                torch.tensor([[*context, *path]], device=logits.device), logits[row : row + 1]
            )
            for row, path in enumerate(paths)
        ]
        return torch.cat(rows)


def copied(processor: HFCallable, memo: dict[int, Any]) -> HFCallable:
    """Return a copy of a processor, whose state then belongs to one of several texts.

    Copies share the weights of the processor's own modules. A function is its own copy.

    Args:
        memo: Objects that copies share or that were copied before, by id, see `copy.deepcopy`.

    Raises:
        InputError: The processor cannot be copied.
    """
    held = getattr(processor, "__dict__", {}).values()
    memo.update((id(value), value) for value in held if isinstance(value, torch.nn.Module))
    try:
        return deepcopy(processor, memo)
    except Exception as error:
        raise InputError(
            f"the logits_processor {type(processor).__name__} cannot be copied "
            f"({type(error).__name__}: {error}); expected one that copy.deepcopy takes, as each of "
            "several texts gets a copy that remembers it alone. Give it a __deepcopy__, or call "
            "generate for one text at a time."
        ) from error


def build_processors(
    sampling: Sampling,
    prompt_length: int,
    ends: Sequence[int],
    extra: Sequence[HFCallable] = (),
    current: Sequence[Processor] = (),
) -> list[Processor]:
    """Return the processors of the settings, in transformers' order.

    The model's own processors, `current`, and those of the call, `extra`, follow them.
    """
    results: list[Processor] = []
    if sampling.sequence_bias:
        biases = {tuple(k): float(v) for k, v in sampling.sequence_bias.items()}
        results.append(_hf("SequenceBiasLogitsProcessor", biases))
    if sampling.logit_bias:
        results.append(TokenBias(sampling.logit_bias))
    if sampling.repetition_penalty not in (None, 1.0):
        results.append(RepetitionPenalty(sampling.repetition_penalty))
    if sampling.frequency_penalty or sampling.presence_penalty:
        results.append(
            CountPenalty(sampling.frequency_penalty, sampling.presence_penalty, prompt_length)
        )
    if sampling.no_repeat_ngram_size:
        results.append(_hf("NoRepeatNGramLogitsProcessor", sampling.no_repeat_ngram_size))
    if sampling.bad_words_ids:
        words = [list(word) for word in sampling.bad_words_ids]
        results.append(_hf("NoBadWordsLogitsProcessor", words, list(ends) or None))
    if sampling.min_new_tokens and ends:
        results.append(MinimumLength(sampling.min_new_tokens, ends, prompt_length))
    results.extend(current)
    results.extend(HFProcessor(processor) for processor in extra)
    return results


def _hf(name: str, *arguments: Any) -> HFProcessor:
    from transformers.generation import logits_process

    return HFProcessor(getattr(logits_process, name)(*arguments))
