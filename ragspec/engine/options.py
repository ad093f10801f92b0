"""Options of a call of the engine, checked before anything runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, TypedDict

from torch import Tensor

from ragspec.drafters.base import KnownStates, SourceText
from ragspec.engine.prefix_cache import PrefixCache
from ragspec.engine.prompts import check_length, read_prediction
from ragspec.errors import InputError, SamplingError
from ragspec.registry import did_you_mean
from ragspec.sampling.processors import ByRow, HFCallable, Processor, copied
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import Criterion, StopRule
from ragspec.sampling.transform import Transform, default_processors, with_defaults


@dataclass(slots=True)
class RowSettings:
    """Settings that all rows of one call share; see `Options`.

    Attributes:
        logprobs: Alternatives to return, None for no log-probabilities.
        extra: Processors of transformers.
        predictions: One for each prompt, or none at all.
        alone: Whether the call has one row, whose processors need no copy.
        defaults: The model's generation config, None to ignore it.
    """

    sampling: Sampling
    stop: StopRule
    logprobs: int | None = None
    extra: Sequence[HFCallable | ByRow] = ()
    spans: Sequence[tuple[int, int, int, int]] = ()
    texts: Sequence[SourceText] = ()
    predictions: Sequence[SourceText | None] = ()
    alone: bool = True
    defaults: Any = None
    prefix_cache: PrefixCache | None = None
    on_read: Callable[[int, int], None] | None = None
    resume_from: Sequence[int] = ()
    prefix: int = 0
    transform: Transform | None = None
    draft_prompt: tuple[int, ...] | None = None
    known_states: tuple[KnownStates, ...] = ()

    def stop_of(self, row: int) -> StopRule:
        """Return the stop rule of row number `row` of the call, with the criteria of that row."""
        criteria = tuple(_of_row(criterion, row) for criterion in self.stop.criteria)
        return replace(self.stop, criteria=criteria)

    def extra_of(self, row: int, shared: Sequence[Any]) -> list[HFCallable]:
        """Return the processors of row number `row`: a `ByRow`'s, or copies that share `shared`."""
        memo = {id(thing): thing for thing in shared}  # one for all: processors may share objects
        processors = [_of_row(each, row) for each in self.extra]
        if self.alone:
            return processors
        pairs: Iterable[tuple[Any, Any]] = zip(self.extra, processors, strict=True)
        return [copied(each, memo) if each is original else each for original, each in pairs]

    def settings_of(self, prompt: Tensor, vocab_size: int) -> list[Processor]:
        """Return the processors of the model's own config for a prompt i64 [1, T]."""
        limit = prompt.shape[1] + self.stop.max_new_tokens
        ends = sorted(self.stop.ends)
        return default_processors(self.defaults, prompt, limit, ends, vocab_size)

    def texts_of(self, prompt: int) -> tuple[SourceText, ...]:
        """Return the texts of prompt number `prompt`, its prediction last."""
        predicted = self.predictions[prompt] if self.predictions else None
        return (*self.texts, predicted) if predicted is not None else tuple(self.texts)


DEFAULT_NEW_TOKENS = 256


class Options(TypedDict, total=False):
    """Keywords of `Engine.generate` and `Engine.stream`.

    They are grouped by length and end, distribution, drafting, and prompt. The drafting options
    never change a token.

    Attributes:
        max_new_tokens: Default 256, or the rest of a shorter context.
        stop: Strings that end the text and are not part of it.
        stop_token_ids: Further end tokens.
        ignore_eos: Continue past the model's own end tokens.
        stopping_criteria: Criteria of transformers; called with one text at a time.
        stop_after: Tokens after which the call returns with the finish reason "paused".
        resume_from: Tokens that earlier calls returned; the text continues after them as if it had
            not paused. Noise, penalties, stop strings and limits count them, and
            `Generation.tokens` contains them; log-probabilities, steps and report are those of this
            call. One prompt, one sample; the prompt may differ from the earlier one.

        logits_processor: Processors of transformers. Each text gets a deep copy, so that a stateful
            one serves that text alone; functions are shared; a `ByRow` makes one for each text.
        ignore_defaults: Ignore penalties and suppressed tokens of the model's generation config.
        transform: Changes the target's distribution before processors and temperature, see
            `Transform`; the text is then exact for that distribution.
        logprobs: Return log-probabilities, with this many alternatives.

        spans, texts: The sources of the prompt, see `DraftRequest`.
        prediction: A text that the output will resemble, see `read_prediction`. The context drafter
            is added if no drafter reads texts.
        draft_prompt: Token ids or text that drafters with a context of their own, such as `Rapid`,
            read in place of the prompt. One prompt.
        known_states: Hidden states over parts of the prompt, read before, in the prompt's order;
            for drafters that need them. One prompt.

        prefix_cache: A `PrefixCache` with the tokens of an earlier call. One prompt, one sample.
        prefix: Number of first tokens of the prompt to cache for other prompts that share them.
        on_read: Called with the tokens read and their total while a long prompt is read: first
            with 0, then after each forward. Of several prompts the longest counts.
    """

    max_new_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Iterable[int] | None
    ignore_eos: bool
    ignore_defaults: bool
    logprobs: int | bool | None
    logits_processor: Sequence[HFCallable | ByRow] | None
    stopping_criteria: Sequence[Criterion | ByRow] | None
    spans: Sequence[tuple[int, int, int, int]] | None
    texts: Sequence[SourceText] | None
    prediction: Any
    prefix_cache: PrefixCache | None
    on_read: Callable[[int, int], None] | None
    stop_after: int | None
    prefix: int
    resume_from: Sequence[int] | None
    transform: Transform | None
    draft_prompt: str | Sequence[int] | None
    known_states: Sequence[KnownStates]


def read_options(
    options: Options,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    vocab_size: int,
    limit: int | None,
    tokenizer: Any = None,
    defaults: Any = None,
) -> RowSettings:
    """Check the options of a call, and return the settings that its rows share.

    Args:
        prompts: Token ids of each prompt.
        ends: The model's end tokens.
        vocab_size: Number of ids that the model produces.
        limit: Positions of the context, None for no limit.
        tokenizer: For stop strings, a prediction and a draft prompt; None without text.
        defaults: The model's generation config.

    Raises:
        InputError, SamplingError, PromptTooLongError: An option is invalid.
    """
    refuse_unknown(options)
    _check_sampling(sampling, len(prompts))
    alone = len(prompts) * sampling.n == 1
    _check_counts(options, len(prompts), alone)
    defaults = None if options.get("ignore_defaults") else defaults
    sampling = with_defaults(sampling, defaults)
    longest = max(len(prompt) for prompt in prompts)
    room = DEFAULT_NEW_TOKENS if limit is None else min(DEFAULT_NEW_TOKENS, limit - longest)
    new = _whole("max_new_tokens", options.get("max_new_tokens"))
    new = max(1, room) if new is None else new
    check_length(longest, new, limit)
    _check_bias(sampling, vocab_size)
    _check_penalties(sampling, prompts, vocab_size)
    stops = options.get("stop_token_ids")
    rule = StopRule(
        frozenset(() if options.get("ignore_eos") else ends)
        | frozenset(_token_ids("stop_token_ids", stops, vocab_size, Iterable) or ()),
        new,
        _stop_strings(options.get("stop", ()), tokenizer),
        _callables("stopping_criteria", options.get("stopping_criteria")),
        _whole("stop_after", options.get("stop_after")),
    )
    _check_bad_words(sampling, rule.ends)
    resume_from = _token_ids("resume_from", options.get("resume_from"), vocab_size) or ()
    if len(resume_from) > new:
        raise InputError(
            f"resume_from has {len(resume_from)} tokens and max_new_tokens is {new}, which counts "
            "them; expected as many or more. Ask for a higher number."
        )
    draft_prompt = options.get("draft_prompt")
    if isinstance(draft_prompt, str):
        if tokenizer is None:
            raise InputError("draft_prompt is a text but the engine has no tokenizer; pass ids")
        draft_prompt = tokenizer(draft_prompt)["input_ids"]
    return RowSettings(
        sampling,
        rule,
        _alternatives(options.get("logprobs", False), vocab_size),
        _callables("logits_processor", options.get("logits_processor")),
        options.get("spans") or (),
        options.get("texts") or (),
        read_prediction(options.get("prediction"), prompts, tokenizer, vocab_size),
        alone=alone,
        defaults=defaults,
        prefix_cache=options.get("prefix_cache"),
        on_read=options.get("on_read"),
        prefix=_prefix(options, prompts),
        resume_from=resume_from,
        transform=options.get("transform"),
        draft_prompt=_token_ids("draft_prompt", draft_prompt, vocab_size),
        known_states=_known_states(options.get("known_states", ()), prompts[0]),
    )


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise InputError for a keyword that is not among `Options`."""
    for name in options:
        if name not in Options.__annotations__:
            hint = did_you_mean(name, Options.__annotations__)
            names = ", ".join(sorted(Options.__annotations__))
            raise InputError(f"unknown option {name!r}.{hint} Known: {names}.")


def _check_counts(options: Options, prompts: int, alone: bool) -> None:
    """Raise InputError for objects of another kind, and for options of one text with several."""
    kinds: dict[str, tuple[Callable[[Any], bool], str]] = {
        "prefix_cache": (lambda value: isinstance(value, PrefixCache), "a PrefixCache"),
        "on_read": (callable, "a function of two numbers"),
        "transform": (
            lambda value: isinstance(value, Transform) and not isinstance(value, type),
            "an object with name, reads_hidden and open(start)",
        ),
    }
    for name, (fits, expected) in kinds.items():
        value = options.get(name)
        if value is not None and not fits(value):
            raise InputError(f"{name} is {value!r}; expected {expected}, or None.")
    for name in ("prefix_cache", "resume_from"):
        if options.get(name) is not None and not alone:
            raise InputError(f"got {name}= with several texts; expected one prompt and n=1.")
    if prompts > 1 and options.get("draft_prompt") is not None:
        raise InputError(f"got draft_prompt= with {prompts} prompts; expected one prompt.")
    if prompts > 1 and options.get("known_states"):
        raise InputError(f"got known_states= with {prompts} prompts; expected one prompt.")


def _whole(name: str, value: Any) -> int | None:
    if value is not None and (not isinstance(value, Integral) or value < 1):
        raise InputError(f"{name} is {value!r}; expected a whole number, at least 1, or None")
    return None if value is None else int(value)


def _token_ids(
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


def _known_states(states: Sequence[KnownStates], prompt: Sequence[int]) -> tuple[KnownStates, ...]:
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


def _prefix(options: Options, prompts: Sequence[Sequence[int]]) -> int:
    """Return how many first tokens of the prompt to cache for other prompts; 0 for none."""
    count = options.get("prefix", 0)
    if not isinstance(count, Integral) or not 0 <= count < len(prompts[0]):
        raise InputError(
            f"prefix is {count!r}; expected a whole number below the prompt's {len(prompts[0])} "
            "tokens, the last of which is always read"
        )
    if count and options.get("prefix_cache") is None:
        raise InputError("got prefix without prefix_cache; expected a PrefixCache beside it.")
    return int(count)


def _stop_strings(stop: str | Sequence[str] | None, tokenizer: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or not all(isinstance(item, str) for item in strings):
        raise InputError(f"stop is {stop!r}; expected a text, a list of them, or None")
    if strings and tokenizer is None:
        raise InputError("stop strings need a tokenizer; pass one, or use stop_token_ids")
    if "" in strings:
        raise InputError("a stop string is empty; expected at least one character")
    return tuple(strings)


def _of_row(processor: Any, row: int) -> Any:
    """Return the processor or criterion of row number `row`: from a `ByRow`, or the object."""
    of_row = getattr(processor, "of_row", None)
    return processor if of_row is None else of_row(row)


def _callables(name: str, values: Sequence[Any] | None) -> tuple[Any, ...]:
    if values is None:
        return ()
    if not isinstance(values, Sequence) or not all(
        callable(each) or hasattr(each, "of_row") for each in values
    ):
        raise InputError(f"{name} is {values!r}; expected a list of callables, or None")
    return tuple(values)


def _alternatives(logprobs: int | bool | None, vocab_size: int) -> int | None:
    """Return how many alternatives to keep with each log-probability, None for neither."""
    if logprobs is False or logprobs is None:
        return None
    top = 0 if logprobs is True else logprobs
    if not isinstance(top, Integral) or not 0 <= top <= vocab_size:
        raise InputError(f"logprobs is {logprobs!r}; expected a number from 0 to {vocab_size}")
    return int(top)


def _check_sampling(sampling: Sampling, prompts: int) -> None:
    if not isinstance(sampling, Sampling):
        raise InputError(
            f"sampling is {sampling!r}; expected a Sampling, such as Sampling(temperature=0.7)"
        )
    seeds = getattr(sampling.seed, "__len__", lambda: prompts)()
    if seeds != prompts:
        raise SamplingError(
            f"got {seeds} seeds for {prompts} prompts; expected one seed, or one for each prompt"
        )


def _check_bias(sampling: Sampling, vocab_size: int) -> None:
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


def _check_bad_words(sampling: Sampling, ends: frozenset[int]) -> None:
    """Raise SamplingError for end tokens as the only bad words: transformers ignores them."""
    words = sampling.bad_words_ids
    if words and all(len(word) == 1 and ends.issuperset(word) for word in words):
        raise SamplingError(
            f"bad_words_ids is {words!r}, which are end tokens; expected others. Use "
            "ignore_eos=True or min_new_tokens to go on past the end."
        )


def _check_penalties(sampling: Sampling, prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
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


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of the model's generation config, else those of the tokenizer."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    if ends is None:
        return []
    return [int(ends)] if isinstance(ends, int) else [int(token) for token in ends]
