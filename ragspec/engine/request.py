"""Requests: one text to generate each, with all options checked before anything runs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import TYPE_CHECKING, Any, TypedDict

from torch import Tensor

from ragspec.drafters.base import SourceText
from ragspec.engine.prompts import (
    Prompts,
    as_list,
    check_length,
    encode_prompts,
    encode_value,
    end_tokens,
    expect_ids,
    read_prediction,
    stop_strings,
)
from ragspec.errors import InputError, PromptTooLongError, SamplingError, pluralize
from ragspec.registry import unknown
from ragspec.rules.base import Step
from ragspec.sampling.processors import ByRow, HFCallable, copied, criterion_of_text
from ragspec.sampling.settings import Sampling, fresh_seed, whole
from ragspec.sampling.stopping import Criterion, StopRule
from ragspec.sampling.transform import Transform
from ragspec.types import Tokenizer

if TYPE_CHECKING:
    from ragspec.verification.causal import CausalTarget

DEFAULT_NEW_TOKENS = 256
OnRead = Callable[[int, int], None]
OnStep = Callable[[int, Step], None]


@dataclass(frozen=True, slots=True)
class Request:
    """One text to generate: one sample of one prompt.

    Attributes:
        number: The number of the text in its call.
        sample: Which of the samples of its prompt it is; each has its own noise.
        seed: None chooses one.
        processors: For this text alone.
        texts: Texts to draft from, the prediction last.
        defaults: The model's generation config, None to ignore it.
        options: The others, see `Options`.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    stop: StopRule
    number: int = 0
    sample: int = 0
    seed: int | None = None
    processors: tuple[HFCallable, ...] = ()
    logprobs: int | None = None
    spans: tuple[tuple[int, int, int, int], ...] = ()
    texts: tuple[SourceText, ...] = ()
    defaults: Any = None
    resume_from: tuple[int, ...] = ()
    transform: Transform | None = None
    draft_prompt: tuple[int, ...] | None = None
    tenant: str = ""
    priority: int = 0
    on_read: OnRead | None = None
    on_step: OnStep | None = None


class Options(TypedDict, total=False):
    """Keywords of `Engine.generate`, `Engine.stream` and `Engine.submit`.

    They are grouped by length and end, distribution, drafting, prompt, and scheduling. The drafting
    options never change a token.

    Attributes:
        max_new_tokens: Default 256, or the rest of a shorter context.
        stop: Strings that end the text and are not part of it; None for those of the model's
            generation config.
        stop_token_ids: Further end tokens.
        ignore_eos: Continue past the model's own end tokens.
        stopping_criteria: Criteria of transformers; called with one text at a time, each with state
            for that text alone, see `criterion_of_text`.
        stop_after: Tokens after which the call returns with the finish reason "paused".
        resume_from: Tokens that earlier calls returned; the text continues after them as if it had
            not paused. Noise, penalties, stop strings and limits count them, and
            `Generation.tokens` contains them; log-probabilities, steps and report are those of this
            call. One prompt, one sample; the prompt may differ from the earlier one.

        logits_processor: Processors of transformers. Each text gets a deep copy, so that a stateful
            one serves that text alone; functions are shared; a `ByRow` makes one for each text. It
            replaces the setting of its class. The rules block and typical get no drafts beside it.
        ignore_defaults: Ignore penalties, suppressed tokens and stop strings of the model's
            generation config.
        transform: Changes the target's distribution before processors and temperature, see
            `Transform`; the text is then exact for that distribution.
        logprobs: Return log-probabilities, with this many alternatives.

        spans, texts: The sources of the prompt, see `DraftRequest`.
        prediction: A text that the output will resemble, see `read_prediction`. The context drafter
            is added if no drafter reads texts.
        draft_prompt: Token ids or text that drafters with a context of their own, such as `Rapid`,
            read in place of the prompt. One prompt.

        on_read: Called with the tokens read and their total while a long prompt is read: first
            with 0, then after each forward. Of several prompts the longest counts.
        on_step: Called with the number of the text and each of its steps. An error ends the text.
        tenant: Owner of the text; neither the prefix cache nor what drafters learn from texts is
            shared between tenants.
        priority: Waiting requests of a higher priority start first.
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
    prediction: object
    stop_after: int | None
    resume_from: Sequence[int] | None
    transform: Transform | None
    draft_prompt: str | Sequence[int] | None
    on_read: OnRead | None
    on_step: OnStep | None
    tenant: str
    priority: int


def read_requests(
    prompts: Prompts,
    sampling: Sampling | None,
    options: Options,
    target: "CausalTarget",
    tokenizer: "Tokenizer | None",
    attention_mask: Tensor | None = None,
) -> tuple[list[Request], bool]:
    """Check the arguments of a call; return a request for each sample of each prompt.

    Returns:
        The requests, the samples of a prompt one after the other, and whether a single prompt was
        passed.
    """
    options = {name: as_list(value) for name, value in options.items()}  # type: ignore[assignment]
    check_options(options)
    every, single = encode_prompts(prompts, tokenizer, target.input_size, attention_mask)
    for ids in every:
        target.check_prompt(ids)
    sampling = Sampling() if sampling is None else sampling
    _check_seeds(sampling, len(every))
    alone = len(every) * sampling.n == 1
    _check_together(options, every, alone)
    common = _common(options, sampling, every, target, tokenizer)
    predictions = read_prediction(options.get("prediction"), every, tokenizer, target.vocab_size)
    memo = {id(thing): thing for thing in (target.loaded, tokenizer)}  # copies share these
    longest = max(every, key=len)  # it alone shows how far it was read
    requests: list[Request] = []
    for number, (prompt, predicted) in enumerate(zip(every, predictions, strict=True)):
        seed = sampling.seed_of(number)
        if seed is None and sampling.n > 1:
            seed = fresh_seed()
        for sample in range(sampling.n):
            criteria, processors = _callables(options, len(requests), alone, memo)
            request = replace(
                common,
                prompt=tuple(prompt),
                stop=replace(common.stop, criteria=criteria),
                number=len(requests),
                sample=sample,
                seed=seed,
                processors=processors,
                texts=common.texts if predicted is None else (*common.texts, predicted),
                on_read=options.get("on_read") if prompt is longest and not sample else None,
            )
            requests.append(request)
    return requests, single


def _common(
    options: Options,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    target: "CausalTarget",
    tokenizer: "Tokenizer | None",
) -> Request:
    """Return the request that all texts of a call have in common."""
    config = sampling.config_over(target.generation_config)
    defaults, vocab_size = None if options.get("ignore_defaults") else config, target.vocab_size
    resume_from = tuple(expect_ids("resume_from", options.get("resume_from") or (), vocab_size))
    lengths = max(map(len, prompts)), len(resume_from)
    rule = _stop_rule(options, sampling, lengths, config, target, tokenizer)
    sampling = sampling.with_defaults(defaults)
    _check_sampling(sampling, max(map(max, prompts)), vocab_size, rule.ends)
    draft_prompt = options.get("draft_prompt")
    if draft_prompt is not None:
        draft_prompt = encode_value("draft_prompt", draft_prompt, tokenizer, vocab_size)
    return Request(
        (),
        sampling,
        rule,
        logprobs=_alternatives(options.get("logprobs"), vocab_size),
        spans=tuple(options.get("spans") or ()),
        texts=tuple(options.get("texts") or ()),
        defaults=defaults,
        resume_from=resume_from,
        transform=options.get("transform"),
        draft_prompt=draft_prompt,
        tenant=options.get("tenant") or "",
        priority=whole(options.get("priority")) or 0,
        on_step=options.get("on_step"),
    )


def _callables(
    options: Options, row: int, alone: bool, memo: dict[int, object]
) -> tuple[tuple[Criterion, ...], tuple[HFCallable, ...]]:
    """Return the criteria and the processors of text number `row`, copies unless it is alone."""
    memo = dict(memo)  # one for all: processors may share objects

    def of_text(each: Any, copy: Callable[[Any, dict[int, object]], Any]) -> Any:
        if isinstance(each, ByRow):
            return each.of_row(row)
        return each if alone else copy(each, memo)

    criteria = [of_text(each, criterion_of_text) for each in options.get("stopping_criteria") or ()]
    processors = [of_text(each, copied) for each in options.get("logits_processor") or ()]
    return tuple(criteria), tuple(processors)


def _stop_rule(
    options: Options,
    sampling: Sampling,
    lengths: tuple[int, int],
    config: object,
    target: "CausalTarget",
    tokenizer: "Tokenizer | None",
) -> StopRule:
    """Return the rule that ends the texts.

    Args:
        lengths: Tokens of the longest prompt and of the resumed text.
        config: The generation config with end tokens and stop strings, None for none.
    """
    (prompt, resumed), limit = lengths, target.max_length
    new, stop = whole(options.get("max_new_tokens")), options.get("stop")
    if stop is None and not options.get("ignore_defaults"):
        stop = getattr(config, "stop_strings", None)
    if new is None and sampling.defaults is not None:
        new = _configured_length(config, prompt, limit)
    check_length(prompt, new, limit)
    if new is None:
        new = DEFAULT_NEW_TOKENS if limit is None else min(DEFAULT_NEW_TOKENS, limit - prompt)
    if (strings := stop_strings(stop)) and tokenizer is None:
        raise InputError("stop strings need a tokenizer; pass one, or use stop_token_ids")
    if resumed > new:
        raise InputError(
            f"resume_from has {pluralize(resumed, 'token')} and max_new_tokens is {new}, which "
            "counts them; expected as many or more. Ask for a higher number."
        )
    if (least := sampling.min_new_tokens or 0) > new:
        raise InputError(
            f"min_new_tokens is {least} and max_new_tokens is {new}; expected as many or more. "
            "Raise max_new_tokens, or lower min_new_tokens."
        )
    ends = expect_ids("stop_token_ids", options.get("stop_token_ids") or (), target.vocab_size)
    if not options.get("ignore_eos"):
        ends += end_tokens(config, tokenizer)
    return StopRule(frozenset(ends), new, strings, stop_after=whole(options.get("stop_after")))


def _configured_length(config: object, prompt: int, limit: int | None) -> int | None:
    """Return the new tokens that a generation config asks for, None if it names no length."""
    new, total = (getattr(config, name, None) for name in ("max_new_tokens", "max_length"))
    if new is not None or total is None:
        return new
    if prompt >= total:
        raise PromptTooLongError(
            f"the prompt has {pluralize(prompt, 'token')} and the generation config has max_length="
            f"{total}, which counts them; expected a higher one. Pass max_new_tokens."
        )
    return int(total if limit is None else min(total, limit)) - prompt


def check_options(options: Mapping[str, object], taken: Collection[str] = (), by: str = "") -> None:
    """Raise InputError for an unknown option, a value of another kind, or what `by` sets itself."""
    for name, value in options.items():
        if name in Sampling.__dataclass_fields__:
            raise InputError(f"unknown option {name!r} of Sampling; pass Sampling({name}=...).")
        if name not in Options.__annotations__:
            raise InputError(unknown("option", name, Options.__annotations__))
        fits, expected = _KINDS.get(name, (None, ""))
        if value is not None and fits is not None and not fits(as_list(value)):
            raise InputError(f"{name} is {value!r:.80}; expected {expected}, or None.")
        if name in taken and value:
            raise InputError(f"got {name}=, which {by} sets itself; leave it out.")


def expect_engine(engine: object, *, bare: bool = False) -> None:
    """Raise InputError unless `engine` is an Engine with a tokenizer, or without one if `bare`."""
    if not hasattr(engine, "tokenizer"):
        raise InputError(
            f"got {engine!r} as the engine; expected an Engine, such as "
            "Engine.from_pretrained('starter')."
        )
    if engine.tokenizer is None and not bare:
        raise InputError("The engine has no tokenizer; expected one with it.")


def expect_function(function: object, name: str) -> None:
    """Raise InputError unless the value can be called or is None."""
    if function is not None and not callable(function):
        raise InputError(f"{name} is {function!r}; expected a function, or None.")


def _each(fits: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda values: isinstance(values, Sequence) and all(map(fits, values))


_CALLABLES = (_each(lambda f: callable(f) or isinstance(f, ByRow)), "a list of callables")
_COUNT = (lambda n: (whole(n) or 0) >= 1, "a whole number, at least 1")
_FLAG = (lambda value: value in (0, 1), "True or False")
_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "max_new_tokens": _COUNT,
    "stop_after": _COUNT,
    "ignore_eos": _FLAG,
    "ignore_defaults": _FLAG,
    "logits_processor": _CALLABLES,
    "stopping_criteria": _CALLABLES,
    "stop_token_ids": (lambda value: isinstance(value, Iterable), "a list of token ids"),
    "resume_from": (lambda value: isinstance(value, Sequence), "a list of token ids"),
    "spans": (
        _each(lambda s: isinstance(s, Sequence) and len(s) == 4 and None not in map(whole, s)),
        "a list of (start, end, document, offset)",
    ),
    "texts": (
        _each(lambda text: isinstance(text, SourceText)),
        "a list of ragspec.drafters.base.SourceText",
    ),
    "on_read": (callable, "a function of two numbers"),
    "on_step": (callable, "a function of a number and a Step"),
    "tenant": (lambda value: isinstance(value, str), "a text"),
    "priority": (lambda value: whole(value) is not None, "a whole number"),
    "transform": (lambda value: isinstance(value, Transform), "a Transform"),
}


def _check_together(options: Options, prompts: Sequence[Sequence[int]], alone: bool) -> None:
    """Raise InputError for options that do not suit the prompts or their number."""
    if options.get("resume_from") is not None and not alone:
        raise InputError("got resume_from= with several texts; expected one prompt and n=1.")
    if len(prompts) > 1 and options.get("draft_prompt"):
        raise InputError(f"got draft_prompt= with {len(prompts)} prompts; expected one prompt.")
    spans, least = options.get("spans") or (), min(map(len, prompts))
    if not all(0 <= start <= end <= least for start, end, *_ in spans):
        raise InputError(f"spans is {spans!r}; expected parts of the prompt, 0 to {least} tokens.")


def _alternatives(logprobs: int | bool | None, vocab_size: int) -> int | None:
    """Return how many alternatives to keep with each log-probability, None for neither."""
    if logprobs is False or logprobs is None:
        return None
    number = whole(0 if logprobs is True else logprobs)
    if number is None or not 0 <= number <= vocab_size:
        raise InputError(f"logprobs is {logprobs!r}; expected a number from 0 to {vocab_size}")
    return number


def _check_seeds(sampling: Sampling, prompts: int) -> None:
    """Raise an error unless this is a Sampling with seeds for the prompts."""
    if not isinstance(sampling, Sampling):
        raise InputError(
            f"sampling is {sampling!r}; expected a Sampling, such as Sampling(temperature=0.7)"
        )
    seeds = len(sampling.seed) if isinstance(sampling.seed, tuple) else prompts
    if seeds != prompts:
        raise SamplingError(
            f"got {pluralize(seeds, 'seed')} for {pluralize(prompts, 'prompt')}; expected one, "
            "or one for each prompt"
        )


def _check_sampling(sampling: Sampling, highest: int, size: int, ends: frozenset[int]) -> None:
    """Raise SamplingError for biases, bad words or penalties that the model cannot apply."""
    words = sampling.bad_words_ids
    if not isinstance(words, Sequence | None):
        raise SamplingError(f"bad_words_ids is {words!r}; expected lists of token ids, or None")
    lists = [("sequence_bias", ids) for ids in _biases("sequence_bias", sampling.sequence_bias)]
    for name, ids in (*lists, *(("bad_words_ids", word) for word in words or ())):
        if not isinstance(ids, Collection) or not len(ids):
            raise SamplingError(f"{name} has {ids!r}; expected token ids in its place")
        expect_ids(name, ids, size, SamplingError)
    expect_ids("logit_bias", _biases("logit_bias", sampling.logit_bias), size, SamplingError)
    if words and all(len(word) == 1 and ends.issuperset(word) for word in words):
        raise SamplingError(
            f"bad_words_ids is {words!r}, which are end tokens, and transformers ignores them; "
            "expected others. Use ignore_eos=True or min_new_tokens to go on past the end."
        )
    penalized = sampling.repetition_penalty not in (None, 1.0) or sampling.no_repeat_ngram_size
    if penalized and highest >= size:
        raise SamplingError(
            f"got repetition_penalty or no_repeat_ngram_size with the id {highest} in a prompt, "
            f"which the model reads and never produces (it has {size} of those); expected "
            "neither. Use frequency_penalty or presence_penalty: they leave the prompt out."
        )


def _biases(name: str, biases: object) -> Mapping[object, float]:
    """Return biases, none of them near infinity in float32, which would make nan of the rest."""
    if not isinstance(biases, Mapping | None):
        raise SamplingError(f"{name} is {biases!r}; expected a mapping to numbers, or None")
    for value in (biases or {}).values():
        if not isinstance(value, Real) or not value < 1e30:
            expected = "a number below 1e30, or -inf"
            raise SamplingError(f"{name} has the bias {value!r}; expected {expected}")
    return biases or {}
