"""Requests: one text to generate each, with all options checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict

from ragspec.drafters.base import KnownStates, SourceText
from ragspec.engine import checks
from ragspec.engine.prompts import check_length, read_prediction
from ragspec.errors import InputError
from ragspec.registry import did_you_mean
from ragspec.rules.base import Step
from ragspec.sampling.noise import fresh_seed
from ragspec.sampling.processors import ByRow, HFCallable, copied
from ragspec.sampling.settings import Sampling
from ragspec.sampling.stopping import Criterion, StopRule
from ragspec.sampling.transform import Transform

DEFAULT_NEW_TOKENS = 256
OnRead = Callable[[int, int], None]
OnStep = Callable[[int, Step], None]


@dataclass(frozen=True, slots=True)
class Request:
    """One text to generate: one sample of one prompt.

    Attributes:
        prompt: Token ids.
        number: The number of the text in its call.
        sample: Which of the samples of its prompt it is; each has its own noise.
        seed: None chooses one.
        processors: Processors of transformers, for this text alone.
        logprobs: Alternatives to return, None for no log-probabilities.
        texts: Texts to draft from, the prediction last.
        predicted: Whether the last of them is a prediction.
        defaults: The model's generation config, None to ignore it.
        prefill: Read the prompt into the prefix cache, and generate nothing.
        cached: Whether a prefill leaves out what the prefix cache has.
        states: Return the hidden states of a prefill.
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
    predicted: bool = False
    defaults: Any = None
    resume_from: tuple[int, ...] = ()
    transform: Transform | None = None
    draft_prompt: tuple[int, ...] | None = None
    known_states: tuple[KnownStates, ...] = ()
    tenant: str = ""
    priority: int = 0
    on_read: OnRead | None = None
    on_step: OnStep | None = None
    prefill: bool = False
    cached: bool = True
    states: bool = False


class Options(TypedDict, total=False):
    """Keywords of `Engine.generate`, `Engine.stream` and `Engine.submit`.

    They are grouped by length and end, distribution, drafting, prompt, and scheduling. The drafting
    options never change a token.

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

        on_read: Called with the tokens read and their total while a long prompt is read: first
            with 0, then after each forward. Of several prompts the longest counts.
        on_step: Called with the number of the text and each of its steps. An error ends the text.
        tenant: Owner of the text; the prefix cache is never shared between tenants.
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
    prediction: Any
    stop_after: int | None
    resume_from: Sequence[int] | None
    transform: Transform | None
    draft_prompt: str | Sequence[int] | None
    known_states: Sequence[KnownStates]
    on_read: OnRead | None
    on_step: OnStep | None
    tenant: str
    priority: int


def read_requests(
    options: Options,
    sampling: Sampling,
    prompts: Sequence[Sequence[int]],
    *,
    ends: Sequence[int],
    vocab_size: int,
    limit: int | None,
    tokenizer: Any = None,
    defaults: Any = None,
    shared: Sequence[Any] = (),
) -> list[Request]:
    """Check the options of a call; return a request for each sample of each prompt.

    Args:
        prompts: Token ids of each prompt.
        ends: The model's end tokens.
        vocab_size: Number of ids that the model produces.
        limit: Positions of the context, None for no limit.
        tokenizer: For stop strings, a prediction and a draft prompt; None without text.
        defaults: The model's generation config.
        shared: Objects that copies of a processor share, such as the model.

    Raises:
        InputError, SamplingError, PromptTooLongError: An option is invalid.
    """
    refuse_unknown(options)
    checks.check_sampling(sampling, len(prompts))
    alone = len(prompts) * sampling.n == 1
    checks.check_kinds(options, len(prompts), alone)
    defaults = None if options.get("ignore_defaults") else defaults
    sampling = sampling.with_defaults(defaults)
    longest = max(prompts, key=len)
    resume_from = checks.token_ids("resume_from", options.get("resume_from"), vocab_size) or ()
    rule = _stop_rule(options, len(longest), len(resume_from), ends, vocab_size, limit, tokenizer)
    checks.check_bias(sampling, vocab_size)
    checks.check_penalties(sampling, prompts, vocab_size)
    checks.check_bad_words(sampling, rule.ends)
    logprobs = checks.alternatives(options.get("logprobs", False), vocab_size)
    extra = checks.callables("logits_processor", options.get("logits_processor"))
    predictions = read_prediction(options.get("prediction"), prompts, tokenizer, vocab_size)
    memo = {id(thing): thing for thing in shared}
    requests: list[Request] = []
    for number, prompt in enumerate(prompts):
        seed = sampling.seed_of(number)
        seed = fresh_seed() if seed is None and sampling.n > 1 else seed
        predicted = predictions[number] if predictions else None
        for sample in range(sampling.n):
            row = number * sampling.n + sample
            criteria = tuple(_of_row(criterion, row) for criterion in rule.criteria)
            request = Request(
                tuple(prompt),
                sampling,
                replace(rule, criteria=criteria),
                number=row,
                sample=sample,
                seed=seed,
                processors=_processors(extra, row, alone, memo),
                logprobs=logprobs,
                spans=tuple(options.get("spans") or ()),
                texts=(*(options.get("texts") or ()), *([predicted] if predicted else ())),
                predicted=predicted is not None,
                defaults=defaults,
                resume_from=resume_from,
                transform=options.get("transform"),
                draft_prompt=_draft_prompt(options, tokenizer, vocab_size),
                known_states=checks.known_states(options.get("known_states", ()), prompt),
                tenant=options.get("tenant", ""),
                priority=options.get("priority", 0),
                on_read=options.get("on_read") if prompt is longest and not sample else None,
                on_step=options.get("on_step"),
            )
            requests.append(request)
    return requests


def _stop_rule(
    options: Options,
    prompt: int,
    resumed: int,
    ends: Sequence[int],
    vocab_size: int,
    limit: int | None,
    tokenizer: Any,
) -> StopRule:
    """Return the rule that ends the texts; `prompt` counts the tokens of the longest prompt."""
    room = DEFAULT_NEW_TOKENS if limit is None else min(DEFAULT_NEW_TOKENS, limit - prompt)
    new = checks.whole("max_new_tokens", options.get("max_new_tokens"))
    new = max(1, room) if new is None else new
    check_length(prompt, new, limit)
    if resumed > new:
        raise InputError(
            f"resume_from has {resumed} tokens and max_new_tokens is {new}, which counts them; "
            "expected as many or more. Ask for a higher number."
        )
    further = checks.token_ids(
        "stop_token_ids", options.get("stop_token_ids"), vocab_size, Iterable
    )
    return StopRule(
        frozenset(() if options.get("ignore_eos") else ends) | frozenset(further or ()),
        new,
        checks.stop_strings(options.get("stop", ()), tokenizer),
        checks.callables("stopping_criteria", options.get("stopping_criteria")),
        checks.whole("stop_after", options.get("stop_after")),
    )


def refuse_unknown(options: Mapping[str, Any]) -> None:
    """Raise InputError for a keyword that is not among `Options`."""
    for name in options:
        if name not in Options.__annotations__:
            hint = did_you_mean(name, Options.__annotations__)
            names = ", ".join(sorted(Options.__annotations__))
            raise InputError(f"unknown option {name!r}.{hint} Known: {names}.")


def _processors(
    extra: Sequence[HFCallable | ByRow], row: int, alone: bool, memo: dict[int, Any]
) -> tuple[HFCallable, ...]:
    """Return the processors of text number `row`: a `ByRow`'s, or copies unless it is alone."""
    memo = dict(memo)  # one for all: processors may share objects
    result: list[HFCallable] = []
    for each in extra:
        of_row: HFCallable = _of_row(each, row)
        result.append(copied(of_row, memo) if of_row is each and not alone else of_row)
    return tuple(result)


def _of_row(processor: Any, row: int) -> Any:
    """Return the processor or criterion of text number `row`: from a `ByRow`, or the object."""
    return processor.of_row(row) if isinstance(processor, ByRow) else processor


def _draft_prompt(options: Options, tokenizer: Any, vocab_size: int) -> tuple[int, ...] | None:
    """Return the token ids of `draft_prompt`, None for none."""
    draft_prompt = options.get("draft_prompt")
    if isinstance(draft_prompt, str):
        if tokenizer is None:
            raise InputError("draft_prompt is a text but the engine has no tokenizer; pass ids")
        draft_prompt = tokenizer(draft_prompt)["input_ids"]
    return checks.token_ids("draft_prompt", draft_prompt, vocab_size)


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Return the end tokens of the model's generation config, else those of the tokenizer."""
    ends = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if ends is None:
        ends = getattr(tokenizer, "eos_token_id", None)
    if ends is None:
        return []
    return [int(ends)] if isinstance(ends, int) else [int(token) for token in ends]
