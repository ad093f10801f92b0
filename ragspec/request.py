"""What one call of the engine may ask for beside the prompt and the sampling."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, TypedDict

from ragspec.draft import SourceText
from ragspec.errors import InputError, SamplingError
from ragspec.names import did_you_mean
from ragspec.prediction import read_prediction
from ragspec.processors import HFCallable
from ragspec.prompts import check_length
from ragspec.runs import RowSettings
from ragspec.sampling import Sampling
from ragspec.stops import Criterion, StopRule

DEFAULT_NEW_TOKENS = 256


class Options(TypedDict, total=False):
    """Keywords of `Engine.generate` and `Engine.stream`.

    max_new_tokens: default 256, or less where the context is short. stop: strings that end the
    text and are not part of it. stop_token_ids: further end tokens. ignore_eos: go on past the
    model's own. logprobs: keep log-probabilities, with as many alternatives. logits_processor,
    stopping_criteria: any of transformers'. spans, texts: what the prompt was made from, see
    `DraftRequest`. prediction: a text that the output will resemble, see `read_prediction`; it
    may only make it faster, through drafters that read the texts of a request.
    """

    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | bool
    logits_processor: Sequence[HFCallable]
    stopping_criteria: Sequence[Criterion]
    spans: Sequence[tuple[int, int, int, int]]
    texts: Sequence[SourceText]
    prediction: Any


def read_options(
    options: Options,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    has_text: bool,
    vocab_size: int,
    limit: int | None,
    tokenizer: Any = None,
) -> RowSettings:
    """Return what the rows of a call share, checked before any work is done.

    ends: the model's end tokens. has_text: whether there is a tokenizer. limit: positions of the
    context. tokenizer: for a prediction. Raises InputError, SamplingError, PromptTooLongError.
    """
    _refuse_unknown(options)
    longest = max(len(prompt) for prompt in prompts)
    new = _new_tokens(options.get("max_new_tokens"), longest, limit)
    check_length(longest, new, limit)
    _check_bias(sampling, vocab_size)
    _check_penalties(sampling, prompts, vocab_size)
    own = () if options.get("ignore_eos") else ends
    rule = StopRule(
        frozenset(own) | _stop_ids(options.get("stop_token_ids")),
        new,
        _stop_strings(options.get("stop", ()), has_text),
        tuple(options.get("stopping_criteria", ())),
    )
    return RowSettings(
        sampling,
        rule,
        _alternatives(options.get("logprobs", False), vocab_size),
        options.get("logits_processor", ()),
        options.get("spans", ()),
        options.get("texts", ()),
        read_prediction(options.get("prediction"), prompts, tokenizer, vocab_size),
    )


def _refuse_unknown(options: Options) -> None:
    for name in options:
        if name not in Options.__annotations__:
            hint = did_you_mean(name, Options.__annotations__)
            known = ", ".join(sorted(Options.__annotations__))
            raise InputError(f"unknown option {name!r}.{hint} Known: {known}.")


def _new_tokens(asked: int | None, longest: int, limit: int | None) -> int:
    if asked is None:
        room = DEFAULT_NEW_TOKENS if limit is None else limit - longest
        return max(1, min(DEFAULT_NEW_TOKENS, room))
    if not isinstance(asked, Integral) or asked < 1:
        raise InputError(f"max_new_tokens is {asked!r}; expected a whole number, at least 1")
    return int(asked)


def _stop_strings(stop: str | Sequence[str] | None, has_text: bool) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise InputError(f"stop is {stop!r}; expected a text, a list of them, or None")
    if strings and not has_text:
        raise InputError("stop strings need a tokenizer; pass one, or use stop_token_ids")
    if "" in strings:
        raise InputError("a stop string is empty; expected at least one character")
    return tuple(strings)


def _stop_ids(ids: Sequence[int] | None) -> frozenset[int]:
    for token in ids or ():  # ids past the vocabulary pass: some configs name such end tokens
        if not isinstance(token, Integral):
            raise InputError(f"stop_token_ids has {token!r}; expected token ids")
    return frozenset(int(token) for token in ids or ())


def _alternatives(logprobs: int | bool, vocab_size: int) -> int | None:
    """Return how many alternatives to keep with each log-probability, None for no such thing."""
    if logprobs is False:
        return None
    top = 0 if logprobs is True else int(logprobs)
    if not 0 <= top <= vocab_size:
        raise InputError(f"logprobs is {logprobs}; expected a number from 0 to {vocab_size}")
    return top


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
    for token in sampling.logit_bias or ():
        if not 0 <= token < vocab_size:
            raise SamplingError(
                f"logit_bias has the token id {token}; expected 0 to {vocab_size - 1}"
            )


def _check_penalties(sampling: Sampling, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Refuse what would look up ids of the prompt among the logits, which lack some of them."""
    if sampling.repetition_penalty == 1.0 and not sampling.no_repeat_ngram_size:
        return
    highest = max(max(prompt) for prompt in prompts)
    if highest >= vocab_size:
        raise SamplingError(
            f"got repetition_penalty or no_repeat_ngram_size with the id {highest} in a prompt, "
            f"which the model reads and never produces (it has {vocab_size} of those); expected "
            "neither. Use frequency_penalty or presence_penalty: they leave the prompt out."
        )


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the ids that end a text, by the model's generation config, else by the tokenizer."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return []
    return [int(found)] if isinstance(found, int) else [int(token) for token in found]
