"""What a model's own generation config asks of every text, whatever the call says.

transformers fills what a call leaves open from `model.generation_config`, so greedy text is the
same only where penalties, forbidden and forced tokens of that config are honoured here too. What
chooses among tokens (temperature, filters, beams) is the call's own: `Sampling` says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ragspec.errors import InputError
from ragspec.sampling.processors import HFProcessor, MinimumLength, Processor, TokenBias
from ragspec.sampling.settings import Sampling

_SAMPLING = (
    "repetition_penalty",
    "no_repeat_ngram_size",
    "min_new_tokens",
    "bad_words_ids",
    "sequence_bias",
)
# Guidance runs the model once more for every token, a watermark comes after the filters.
_REFUSED = {"guidance_scale": (None, 1, 1.0), "watermarking_config": (None,)}


def with_defaults(sampling: Sampling, config: Any) -> Sampling:
    """Return the sampling, what it leaves open (None) filled in from a model's config, if any.

    Raises InputError for what the engine cannot honour, SamplingError for values out of range.
    """
    for name, none in _REFUSED.items():
        if (value := getattr(config, name, None)) not in none:
            raise InputError(
                f"the model's generation_config has {name}={value!r}; expected none of it. Use "
                "ragspec.bridge, which follows it, or ignore_defaults=True."
            )
    request = {name: getattr(config, name, None) for name in _SAMPLING}
    if isinstance(request["sequence_bias"], Sequence):
        request["sequence_bias"] = {tuple(ids): bias for ids, bias in request["sequence_bias"]}
    unset = {
        name: value
        for name, value in request.items()
        if value is not None and getattr(sampling, name) is None
    }
    return replace(sampling, **unset) if unset else sampling


def default_processors(
    config: Any, prompt: torch.Tensor, limit: int, ends: Sequence[int], vocab_size: int
) -> list[Processor]:
    """Return what a model's config, if any, asks for beside `Sampling`, in transformers' order.

    prompt i64 [1, T]: of the text, where the logits are. limit: the most tokens of prompt and
    text. ends: ids that end the text.
    """
    from transformers.generation import logits_process as hf

    start = prompt.shape[1]
    first = start + (start == 1 and getattr(config, "forced_bos_token_id", None) is not None)
    makers: dict[str, Callable[[Any], Processor | None]] = {
        "encoder_repetition_penalty": lambda penalty: HFProcessor(
            hf.EncoderRepetitionPenaltyLogitsProcessor(penalty, prompt)
        ),
        "encoder_no_repeat_ngram_size": lambda size: (
            HFProcessor(hf.EncoderNoRepeatNGramLogitsProcessor(size, prompt)) if size else None
        ),
        "min_length": lambda least: MinimumLength(least - start, ends, start) if least else None,
        "forced_bos_token_id": lambda token: HFProcessor(hf.ForcedBOSTokenLogitsProcessor(token)),
        "forced_eos_token_id": lambda token: HFProcessor(
            hf.ForcedEOSTokenLogitsProcessor(limit, token)
        ),
        "remove_invalid_values": lambda remove: (
            HFProcessor(hf.InfNanRemoveLogitsProcessor()) if remove else None
        ),
        "exponential_decay_length_penalty": lambda decay: (
            HFProcessor(hf.ExponentialDecayLengthPenalty(decay, list(ends), start))
            if ends
            else None
        ),
        "suppress_tokens": lambda tokens: TokenBias(
            {token: float("-inf") for token in tokens if 0 <= token < vocab_size}
        ),
        "begin_suppress_tokens": lambda tokens: HFProcessor(
            hf.SuppressTokensAtBeginLogitsProcessor(tokens, first)
        ),
    }
    request = ((make, getattr(config, name, None)) for name, make in makers.items())
    instance = [make(value) for make, value in request if value is not None]
    return [processor for processor in instance if processor is not None]
