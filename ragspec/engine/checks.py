"""Checks of the options of a call, one function for each kind of value."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

from ragspec.drafters.base import KnownStates
from ragspec.errors import InputError, SamplingError
from ragspec.sampling.processors import ByRow
from ragspec.sampling.settings import Sampling
from ragspec.sampling.transform import Transform


def check_kinds(options: Mapping[str, Any], prompts: int, alone: bool) -> None:
    """Raise InputError for objects of another kind, and for options of one text with several."""
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        "on_read": (callable, "a function of two numbers"),
        "on_step": (callable, "a function of a number and a Step"),
        "tenant": (lambda value: isinstance(value, str), "a text"),
        "priority": (lambda value: isinstance(value, Integral), "a whole number"),
        "transform": (lambda value: isinstance(value, Transform), "a Transform"),
    }
    for name, (fits, expected) in kinds.items():
        value = options.get(name)
        if value is not None and not fits(value):
            raise InputError(f"{name} is {value!r}; expected {expected}, or None.")
    if options.get("resume_from") is not None and not alone:
        raise InputError("got resume_from= with several texts; expected one prompt and n=1.")
    if prompts > 1 and options.get("draft_prompt") is not None:
        raise InputError(f"got draft_prompt= with {prompts} prompts; expected one prompt.")
    if prompts > 1 and options.get("known_states"):
        raise InputError(f"got known_states= with {prompts} prompts; expected one prompt.")


def whole(name: str, value: Any) -> int | None:
    """Return a whole number of at least 1, or None."""
    if value is not None and (not isinstance(value, Integral) or value < 1):
        raise InputError(f"{name} is {value!r}; expected a whole number, at least 1, or None")
    return None if value is None else int(value)


def token_ids(
    name: str, value: Any, vocab_size: int, kind: type = Sequence
) -> tuple[int, ...] | None:
    """Return a tuple of token ids that the model produces; None for None."""
    if value is None:
        return None
    if not isinstance(value, kind):
        raise InputError(f"{name} is {value!r}; expected a list of token ids, or None")
    tokens: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]
    for token in tokens:
        if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise InputError(
                f"{name} has {token!r}; expected token ids from 0 to {vocab_size - 1}, which the "
                "model produces"
            )
    return tuple(map(int, tokens))


def known_states(states: Sequence[KnownStates], prompt: Sequence[int]) -> tuple[KnownStates, ...]:
    """Return the states, which must be of successive parts of the prompt."""
    end = 0
    for part in states:
        if not isinstance(part, KnownStates) or part.states.dim() != 3 or part.start < end:
            raise InputError(
                f"known_states has {part!r:.60} behind token {end}; expected KnownStates in the "
                "prompt's order, each with states [copies, n, H]."
            )
        end = part.start + part.states.shape[1]
    if end > len(prompt):
        raise InputError(
            f"known_states reach to token {end} of a prompt of {len(prompt)}; expected states "
            "of the prompt's own tokens."
        )
    return tuple(states)


def stop_strings(stop: str | Sequence[str] | None, tokenizer: Any) -> tuple[str, ...]:
    """Return the stop strings of a text, a list of them, or None."""
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise InputError(f"stop is {stop!r}; expected a text, a list of them, or None")
    if strings and tokenizer is None:
        raise InputError("stop strings need a tokenizer; pass one, or use stop_token_ids")
    if "" in strings:
        raise InputError("a stop string is empty; expected at least one character")
    return tuple(strings)


def callables(name: str, values: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return processors or criteria, which must be callable or make one for each text."""
    if values is None:
        return ()
    if not isinstance(values, Sequence) or not all(
        callable(each) or isinstance(each, ByRow) for each in values
    ):
        raise InputError(f"{name} is {values!r}; expected a list of callables, or None")
    return tuple(values)


def alternatives(logprobs: int | bool | None, vocab_size: int) -> int | None:
    """Return how many alternatives to keep with each log-probability, None for neither."""
    if logprobs is False or logprobs is None:
        return None
    top = 0 if logprobs is True else logprobs
    if not isinstance(top, Integral) or not 0 <= top <= vocab_size:
        raise InputError(f"logprobs is {logprobs!r}; expected a number from 0 to {vocab_size}")
    return int(top)


def check_sampling(sampling: Sampling, prompts: int) -> None:
    """Raise an error unless this is a Sampling with seeds for the prompts."""
    if not isinstance(sampling, Sampling):
        raise InputError(
            f"sampling is {sampling!r}; expected a Sampling, such as Sampling(temperature=0.7)"
        )
    seeds = getattr(sampling.seed, "__len__", lambda: prompts)()
    if seeds != prompts:
        raise SamplingError(
            f"got {seeds} seeds for {prompts} prompts; expected one seed, or one for each prompt"
        )


def check_bias(sampling: Sampling, vocab_size: int) -> None:
    """Raise SamplingError for biases that are not numbers, or of ids outside the vocabulary."""
    single, several, banned = sampling.logit_bias, sampling.sequence_bias, sampling.bad_words_ids
    for name, bias in (("logit_bias", single), ("sequence_bias", several)):
        if not isinstance(bias, Mapping | None):
            raise SamplingError(f"{name} is {bias!r}; expected a mapping to numbers, or None")
        for value in (bias or {}).values():
            # Infinity would make distributions of nan.
            if not isinstance(value, Real) or not value < math.inf:
                raise SamplingError(f"{name} has the bias {value!r}; expected a number, or -inf")
    if not isinstance(banned, Sequence | None):
        raise SamplingError(f"bad_words_ids is {banned!r}; expected lists of token ids, or None")
    _check_ids("logit_bias", [(token,) for token in single or ()], vocab_size)
    _check_ids("sequence_bias", several or (), vocab_size)
    _check_ids("bad_words_ids", banned or (), vocab_size)


def _check_ids(name: str, sequences: Iterable[Any], vocab_size: int) -> None:
    for sequence in sequences:
        ids = list(sequence) if isinstance(sequence, Collection) else []
        if not ids:
            raise SamplingError(f"{name} has {sequence!r}; expected token ids in its place")
        for token in ids:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise SamplingError(
                    f"{name} has the token id {token!r}; expected 0 to {vocab_size - 1}"
                )


def check_bad_words(sampling: Sampling, ends: frozenset[int]) -> None:
    """Raise SamplingError for end tokens as the only bad words: transformers ignores them."""
    words = sampling.bad_words_ids
    if words and all(len(word) == 1 and ends.issuperset(word) for word in words):
        raise SamplingError(
            f"bad_words_ids is {words!r}, which are end tokens; expected others. Use "
            "ignore_eos=True or min_new_tokens to go on past the end."
        )


def check_penalties(sampling: Sampling, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Raise SamplingError for penalties on prompt ids that have no logits."""
    if sampling.repetition_penalty in (None, 1.0) and not sampling.no_repeat_ngram_size:
        return
    highest = max(max(prompt) for prompt in prompts)
    if highest >= vocab_size:
        raise SamplingError(
            f"got repetition_penalty or no_repeat_ngram_size with the id {highest} in a prompt, "
            f"which the model reads and never produces (it has {vocab_size} of those); expected "
            "neither. Use frequency_penalty or presence_penalty: they leave the prompt out."
        )
