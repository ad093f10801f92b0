"""The engine: a model, its tokenizer, a drafter and a budget, ready to generate."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ragspec.budget import BudgetPolicy, make_budget
from ragspec.draft import Drafter, SourceText, Step
from ragspec.drafting import build_drafter
from ragspec.errors import InputError, SamplingError
from ragspec.loading import load_model, open_target, read_cost
from ragspec.loop import decode
from ragspec.names import resolve
from ragspec.output import Generation
from ragspec.processors import HFCallable
from ragspec.prompts import EncodedPrompts, check_length, encode_prompts
from ragspec.rules import Rule, check_pairing
from ragspec.runs import RowSettings, Run
from ragspec.sampling import Sampling
from ragspec.stops import Criterion, StopRule
from ragspec.streaming import Stream

DEFAULT_NEW_TOKENS = 256
Span = tuple[int, int, int, int]


class Engine:
    """Generates text from one model, with or without speculation.

    model: a transformers causal model that the caller holds; it is left as it was found.
    tokenizer: its tokenizer, or None for token ids only. drafter: a name, a Drafter, a list of
    them (fused into one tree), or None for plain decoding. draft_model: a smaller model of the
    same vocabulary (object, path or name), one more drafter. budget: "auto", a number of draft
    nodes, or a BudgetPolicy. rule: a name or a Rule. batch_size: prompts decoded side by side.
    Raises UnsupportedModelError, TokenizerMismatchError, UnknownNameError, RuleError.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        drafter: str | Drafter | Sequence[str | Drafter] | None = "context",
        draft_model: Any = None,
        budget: str | int | BudgetPolicy = "auto",
        rule: str | Rule = "walk",
        *,
        batch_size: int = 16,
        cache: Path | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.target = open_target(model, cache)
        self.drafter = build_drafter(drafter, draft_model, tokenizer, self.target)
        self.budget = make_budget(budget)
        self.rule: Rule = resolve("rule", rule)() if isinstance(rule, str) else rule
        self.cost = None
        if self.drafter is not None:
            check_pairing(self.rule, self.drafter)
            self.cost = read_cost(self.target, self.budget, cache)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "starter",
        drafter: str | Drafter | Sequence[str | Drafter] | None = "context",
        draft_model: Any = None,
        budget: str | int | BudgetPolicy = "auto",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        **options: Any,
    ) -> Engine:
        """Return an engine over a model found by path or name; see `Engine` for the rest.

        "starter" and "starter-draft" are the bundled models. Raises ModelNotFoundError with the
        places that were tried.
        """
        loaded, tokenizer = load_model(model, device, dtype)
        if isinstance(draft_model, (str, Path)):
            draft_model = load_model(draft_model, device, dtype)
        return cls(loaded, tokenizer, drafter, draft_model, budget, **options)

    def generate(
        self,
        prompts: Any,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: int | bool = False,
        logits_processor: Sequence[HFCallable] = (),
        spans: Sequence[Span] = (),
        texts: Sequence[SourceText] = (),
        attention_mask: torch.Tensor | None = None,
        stopping_criteria: Sequence[Criterion] = (),
        ignore_eos: bool = False,
        on_step: Callable[[int, Step], None] | None = None,
    ) -> Any:
        """Return a Generation for one prompt, a list of them for several.

        prompts: text, chat messages, token ids, or a batch of one of these; see `encode_prompts`.
        With Sampling(n > 1) every prompt gives a list of n. stop: strings that end the text and
        are not part of it. logprobs: keep log-probabilities, with as many alternatives.
        logits_processor: any transformers processors. spans, texts: what the prompt was made
        from, see `DraftRequest`. stopping_criteria: any of transformers'. ignore_eos: go on past
        the model's end tokens. on_step: called with the number of the row and each of its steps.
        Raises InputError, SamplingError, PromptTooLongError.
        """
        sampling = sampling or Sampling()
        encoded = encode_prompts(prompts, self.tokenizer, self.target.vocab_size, attention_mask)
        settings = self._settings(
            encoded, sampling, max_new_tokens, stop, stop_token_ids, logprobs, stopping_criteria
        )
        if ignore_eos:
            settings.stop = replace(settings.stop, ends=frozenset(stop_token_ids))
        settings.extra, settings.spans, settings.texts = logits_processor, spans, texts
        results: list[list[Generation]] = []
        for start in range(0, len(encoded.ids), self.batch_size):
            part = encoded.ids[start : start + self.batch_size]
            run = self._run(part, settings, start)
            for emissions in self._decode(run):
                if on_step is not None:
                    for emission in emissions:
                        on_step(start * sampling.n + run.rows.index(emission.row), emission.step)
            results.extend(run.results())
        flat = [texts if sampling.n > 1 else texts[0] for texts in results]
        return flat[0] if encoded.single else flat

    def stream(
        self,
        prompt: Any,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        logprobs: int | bool = False,
        logits_processor: Sequence[HFCallable] = (),
        spans: Sequence[Span] = (),
        texts: Sequence[SourceText] = (),
    ) -> Stream:
        """Return an iterator over pieces of text as they are verified; see `Stream`.

        One prompt, one sample; the arguments are those of `generate`.
        """
        if self.tokenizer is None:
            raise InputError("stream() yields text but the engine has no tokenizer; pass one")
        sampling = sampling or Sampling()
        encoded = encode_prompts(prompt, self.tokenizer, self.target.vocab_size)
        if not encoded.single or sampling.n > 1:
            raise InputError(
                f"stream() got {len(encoded.ids)} prompts with n={sampling.n}; expected one prompt "
                "and n=1. Use generate() for several."
            )
        settings = self._settings(encoded, sampling, max_new_tokens, stop, stop_token_ids, logprobs)
        settings.extra, settings.spans, settings.texts = logits_processor, spans, texts
        run = self._run(encoded.ids, settings, 0)
        return Stream(run, self._decode(run), self.tokenizer, settings.stop.strings)

    def _settings(
        self,
        encoded: EncodedPrompts,
        sampling: Sampling,
        max_new_tokens: int | None,
        stop: str | Sequence[str],
        stop_token_ids: Sequence[int],
        logprobs: int | bool,
        criteria: Sequence[Criterion] = (),
    ) -> RowSettings:
        """Check the request as a whole before any work is done."""
        longest = max(len(ids) for ids in encoded.ids)
        limit = self.target.max_length
        if max_new_tokens is None:
            room = DEFAULT_NEW_TOKENS if limit is None else limit - longest
            max_new_tokens = max(1, min(DEFAULT_NEW_TOKENS, room))
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
        check_length(longest, max_new_tokens, limit)
        strings = (stop,) if isinstance(stop, str) else tuple(stop)
        if strings and self.tokenizer is None:
            raise InputError("stop strings need a tokenizer; pass one, or use stop_token_ids")
        if "" in strings:
            raise InputError("a stop string is empty; expected at least one character")
        ends = frozenset(self._end_tokens()) | frozenset(stop_token_ids)
        top = None if logprobs is False else int(logprobs) if logprobs is not True else 0
        size = self.target.vocab_size
        if top is not None and not 0 <= top <= size:
            raise InputError(f"logprobs is {logprobs}; expected a number from 0 to {size}")
        for token in sampling.logit_bias or ():
            if not 0 <= token < size:
                raise SamplingError(
                    f"logit_bias has the token id {token}; expected 0 to {size - 1}"
                )
        return RowSettings(sampling, StopRule(ends, max_new_tokens, strings, tuple(criteria)), top)

    def _end_tokens(self) -> list[int]:
        generation = getattr(self.model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None)
        if found is None:
            found = getattr(self.tokenizer, "eos_token_id", None)
        if found is None:
            return []
        return [int(found)] if isinstance(found, int) else [int(token) for token in found]

    def _run(self, prompts: list[list[int]], settings: RowSettings, first: int) -> Run:
        return Run(self, prompts, settings, first)

    def _decode(self, run: Run) -> Iterator[Any]:
        capacity = max(len(row.context.tokens) + row.context.remaining for row in run.rows)
        began = time.perf_counter()
        try:
            with self.target.open(run.prompts_count, capacity + run.spare) as session:
                yield from decode(session, run.rows, run.prompt_of_row, self.rule)
        finally:
            run.close(time.perf_counter() - began)
