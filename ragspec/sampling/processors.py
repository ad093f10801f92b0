"""Changes of the logits that depend on the text so far, for any node of a tree.

A `Processor` sees the logits of R nodes and, for each, the draft tokens between the last
committed token and that node. The common ones are batched; every transformers LogitsProcessor is
taken as it is by `HFProcessor`, one node at a time in the order in which plain decoding calls it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ragspec.errors import InputError, SamplingError
from ragspec.sampling.penalties import NodePaths, Penalties
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import Criterion

HFCallable = Callable[[Tensor, Tensor], Tensor]


@runtime_checkable
class ByRow(Protocol):
    """Makes a processor or a criterion for each of several texts."""

    def of_row(self, row: int) -> Criterion:
        """Return the callable for text number `row` of the call: prompt * n + sample."""


class Processor(Protocol):
    """Changes logits by the text so far.

    Attributes:
        lazy: Whether it gets one row at a time, visited nodes only, in order.
    """

    lazy: bool

    def apply(self, logits: Tensor, context: Sequence[int], paths: NodePaths) -> Tensor:
        """Return logits f32 [R, V]; row r follows `context` and then `paths[r]`."""


def of_transformers(processor: HFCallable) -> bool:
    """Return whether transformers made a processor; its own may return infinity on purpose."""
    theirs = type(processor).__module__.startswith("transformers.")
    return bool(getattr(processor, "of_transformers", theirs))


class HFProcessor:
    """Any transformers LogitsProcessor, stateful or not.

    Attributes:
        kind: Its class of transformers, shortened; "" for others, whose scores are checked.
    """

    lazy = True

    def __init__(self, processor: HFCallable) -> None:
        self.processor, name = processor, type(processor).__name__
        self.kind = name.removesuffix("LogitsProcessor") if of_transformers(processor) else ""

    def apply(self, logits: Tensor, context: Sequence[int], paths: NodePaths) -> Tensor:
        """Return the scores [R, V] after the processor, which gets ids [1, T] and scores [1, V]."""
        rows = []
        for row, path in enumerate(paths):
            ids = torch.tensor([[*context, *path]], device=logits.device)
            scores: object = self.processor(ids, logits[row : row + 1])
            if not isinstance(scores, Tensor) or scores.shape != logits[row : row + 1].shape:
                got = getattr(scores, "shape", type(scores).__name__)
                raise InputError(
                    f"the logits_processor {self.processor!r:.80} returned {got}; expected scores "
                    f"of shape {[1, logits.shape[1]]}, as it receives."
                )
            if not self.kind and not scores.max() < math.inf and logits[row].max() < math.inf:
                raise SamplingError(
                    f"the logits_processor {self.processor!r:.80} returned {scores.max():g} after "
                    f"{ids.shape[1]} tokens; expected numbers, -inf for forbidden tokens."
                )
            rows.append(scores)
        return torch.cat(rows)


class SequenceBias:
    """Adds a constant to the logit of the last token of a sequence, where the others precede it.

    Transformers' own processor fails unless torch's default dtype is that of the logits.

    Args:
        biases: Token ids and the constant of each sequence; -inf forbids.
    """

    lazy = False

    def __init__(self, biases: Iterable[tuple[Sequence[int], float]]) -> None:
        self._biases = [([*map(int, ids)], float(bias)) for ids, bias in biases]

    def apply(self, logits: Tensor, context: Sequence[int], paths: NodePaths) -> Tensor:
        """Return the logits [R, V] with the biases of each row; see `Processor`."""
        sums: dict[tuple[int, int], float] = {}
        longest = max(len(ids) for ids, _ in self._biases)
        for row, path in enumerate(paths):
            text = [*context[-longest:], *path]
            for (*before, last), bias in self._biases:
                if not before or text[-len(before) :] == before:
                    sums[row, last] = sums.get((row, last), 0.0) + bias
        where = torch.tensor([*sums], dtype=torch.int64, device=logits.device).view(-1, 2).unbind(1)
        values = torch.tensor([*sums.values()], dtype=logits.dtype, device=logits.device)
        return logits.index_put(where, logits[where] + values)


def copied(processor: HFCallable, memo: dict[int, object]) -> HFCallable:
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
            "several texts gets a copy. Give it a __deepcopy__, or generate one text at a time."
        ) from error


def criterion_of_text(criterion: Criterion, memo: dict[int, object]) -> Criterion:
    """Return a criterion for one of several texts: a view of the caller's with state for it alone.

    Attributes that a call assigns belong to the text, as do copies of mutable ones. All others stay
    those of the caller's object, where another thread may set a flag. Functions, criteria of
    transformers and attributes without copies, such as events, are shared. For `memo` see `copied`.
    """
    kind: Any = type(criterion)
    builtin = kind.__new__ is not object.__new__ or not hasattr(criterion, "__dict__")
    if builtin or of_transformers(criterion):
        return criterion
    body = {"__getattr__": lambda _, name: getattr(criterion, name)}
    view: Criterion = object.__new__(type(kind)(kind.__name__, (kind,), body))
    for name, value in [*vars(criterion).items()]:
        before = dict(memo)
        try:
            copy = value if isinstance(value, torch.nn.Module) else deepcopy(value, memo)
        except Exception:  # it leaves parts in the memo
            copy = value
            memo.clear()
            memo.update(before)
        if copy is not value:
            vars(view)[name] = copy
    return view


def build_processors(
    sampling: Sampling,
    prompt_length: int,
    ends: Sequence[int] = (),
    current: Mapping[str, Processor] | None = None,
    extra: Sequence[HFCallable] = (),
) -> list[Processor]:
    """Return the processors of the settings, then the further ones, in transformers' order.

    As there, a processor of the call replaces the setting of its class.

    Args:
        ends: Token ids that end a text.
        current: The model's own processors, see `default_processors`.
        extra: The processors of the call.
    """
    results: dict[str, Processor] = {}
    further = [HFProcessor(each) for each in extra]
    replaced = any(each.kind == "RepetitionPenalty" for each in further)
    if sampling.sequence_bias:
        results["SequenceBias"] = SequenceBias(sampling.sequence_bias.items())
    penalties = Penalties(
        sampling.logit_bias or {},
        1.0 if replaced else sampling.repetition_penalty or 1.0,
        sampling.frequency_penalty,
        sampling.presence_penalty,
        prompt_length=prompt_length,
    )
    if any(penalties.shape):
        results["penalties"] = penalties
    if sampling.no_repeat_ngram_size:
        results |= _hf("NoRepeatNGramLogitsProcessor", sampling.no_repeat_ngram_size)
    if words := sampling.bad_words_ids:
        biases = [(word, -math.inf) for word in words if len(word) > 1 or word[0] not in ends]
        results |= {"NoBadWords": SequenceBias(biases)} if biases else {}
    if (least := sampling.min_new_tokens) and ends:
        results["least"] = Penalties(ends=ends, minimum=least, prompt_length=prompt_length)
    results |= current or {}
    if least is not None:  # as there, it replaces min_length
        results.pop("MinLength", None)
    results |= {each.kind: each for each in reversed(further) if each.kind in results}
    return [*results.values(), *(each for each in further if each not in results.values())]


def default_processors(
    config: object, prompt: Tensor, limit: int, ends: Sequence[int], vocab_size: int
) -> dict[str, Processor]:
    """Return the processors of a model's config, if any, that `Sampling` lacks.

    They are in transformers' order, by `HFProcessor.kind`.

    Args:
        prompt: Token ids i64 [1, T], on the device of the logits.
        limit: Most tokens of prompt and text together.
        ends: Token ids that end the text.
    """
    results, start = dict[str, Processor](), prompt.shape[1]
    setting = ({} if config is None else vars(config)).get
    if (penalty := setting("encoder_repetition_penalty")) is not None:
        results |= _hf("EncoderRepetitionPenaltyLogitsProcessor", penalty, prompt)
    if size := setting("encoder_no_repeat_ngram_size"):
        results |= _hf("EncoderNoRepeatNGramLogitsProcessor", size, prompt)
    if least := setting("min_length"):
        results["MinLength"] = Penalties(ends=ends, minimum=least - start, prompt_length=start)
    if (forced := setting("forced_bos_token_id")) is not None:
        results |= _hf("ForcedBOSTokenLogitsProcessor", forced)
    if (last := setting("forced_eos_token_id")) is not None:
        results |= _hf("ForcedEOSTokenLogitsProcessor", limit, last)
    if setting("remove_invalid_values"):
        results |= _hf("InfNanRemoveLogitsProcessor")
    if ends and (decay := setting("exponential_decay_length_penalty")) is not None:
        results |= _hf("ExponentialDecayLengthPenalty", decay, list(ends), start)
    if (tokens := setting("suppress_tokens")) is not None:
        results["SuppressTokens"] = Penalties({t: -math.inf for t in tokens if 0 <= t < vocab_size})
    if (tokens := setting("begin_suppress_tokens")) is not None:
        first = start + (start == 1 and forced is not None)
        results |= _hf("SuppressTokensAtBeginLogitsProcessor", tokens, first)
    return results


def _hf(name: str, *arguments: object) -> dict[str, Processor]:
    from transformers.generation import logits_process

    processor = HFProcessor(getattr(logits_process, name)(*arguments))
    return {processor.kind: processor}
