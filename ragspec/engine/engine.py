"""The engine: a model, its tokenizer, a drafter and a budget, ready to generate."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from ragspec.budget.base import BudgetPolicy
from ragspec.budget.cost_curve import CostCurve
from ragspec.budget.policy import make_budget
from ragspec.drafters.base import Drafter, check_pairing
from ragspec.drafters.build import build_drafter
from ragspec.engine.loop import decode
from ragspec.engine.options import Options, RowSettings, end_tokens, read_options
from ragspec.engine.output import Generation, Stream
from ragspec.engine.prompts import EncodedPrompts, encode_prompts
from ragspec.engine.rows import Parts, Run, read_cost
from ragspec.engine.step import Emission
from ragspec.errors import InputError
from ragspec.models.load import load_model
from ragspec.models.supported import rank_count
from ragspec.registry import resolve
from ragspec.rules.base import Rule, Step, expect_rule
from ragspec.sampling.settings import Sampling
from ragspec.verification.base import CachedSession, TargetSession
from ragspec.verification.causal import CausalTarget
from ragspec.verification.open import open_target
from ragspec.verification.static.open import open_static


class Engine:
    """Generates text from one model, with or without speculation.

    Args:
        model: A transformers causal model, which is not changed, or a `CausalTarget` over one.
        tokenizer: The model's tokenizer; None for token ids only.
        drafter: A name, a `Drafter`, a list of these (fused into one tree), or None for plain
            decoding.
        draft_model: A smaller model of the same vocabulary (object, path or name) that drafts too.
        budget: Draft nodes per step: "auto", a number, or a `BudgetPolicy`.
        rule: A name or a `Rule`; None for the drafter's, which is usually "walk".
        batch_size: Prompts decoded in one batch.
        static: Steps of fixed shape: "graph" (captured on CUDA), "compile", "eager" (slow, for
            tests), "off", or "auto", which is "graph" on CUDA. A model that does not support them
            is verified without, and its reports say why.
        cache: Directory of measured cost curves, None for the user's cache directory.

    Raises:
        UnsupportedModelError, TokenizerMismatchError, UnknownNameError, RuleError: As named.
        InputError: A number is out of range, or the budget goes by the clock for a model that is
            split across several ranks.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        drafter: str | Drafter | Sequence[str | Drafter] | None = "auto",
        draft_model: Any = None,
        budget: str | int | BudgetPolicy = "auto",
        rule: str | Rule | None = None,
        *,
        batch_size: int = 16,
        static: str = "auto",
        cache: Path | None = None,
    ) -> None:
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}; expected at least 1")
        ready = isinstance(model, CausalTarget)
        self.target: CausalTarget = model if ready else open_target(model, static)
        if ready and static != "auto":
            self.target = open_static(self.target, static)
        self.model = self.target.model
        self.tokenizer = tokenizer
        self.batch_size = batch_size
        self.cost: CostCurve | None = None
        self._listeners: dict[object, Callable[[Generation], None]] = {}
        self._listening = threading.Lock()
        self._configure_drafting(drafter, draft_model, budget, rule, cache)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "starter",
        drafter: str | Drafter | Sequence[str | Drafter] | None = "auto",
        draft_model: Any = None,
        budget: str | int | BudgetPolicy = "auto",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        device_map: str | Mapping[str, Any] | None = None,
        adapter: str | Path | None = None,
        quantize: str | None = None,
        **options: Any,
    ) -> Engine:
        """Return an engine over a model given by path or name; see `Engine` for the rest.

        "starter" and "starter-draft" are the bundled models.

        Args:
            device, dtype, device_map, adapter, quantize: See `load_model`.

        Raises:
            ModelNotFoundError: No model was found; the message lists the places that were tried.
        """
        loaded, tokenizer = load_model(
            model, device, dtype, device_map=device_map, adapter=adapter, quantize=quantize
        )
        if isinstance(draft_model, (str, Path)):
            draft_model = load_model(draft_model, device, dtype)
        return cls(loaded, tokenizer, drafter, draft_model, budget, **options)

    def generate(
        self,
        prompts: Any,
        sampling: Sampling | None = None,
        *,
        attention_mask: Tensor | None = None,
        on_step: Callable[[int, Step], None] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Return a `Generation` for one prompt, a list of them for several.

        The default is greedy decoding. The model's generation config fills in the settings that
        `sampling` leaves open: penalties, forbidden, forced and suppressed tokens. Greedy text is
        then that of transformers.

        Args:
            prompts: Text, chat messages, token ids, or a batch of one of these.
            sampling: Sampling settings; with n > 1 every prompt gives a list of n.
            attention_mask: Marks padding of token ids, [B, T].
            on_step: Called with the number of the row and each of its steps.
            **options: See `Options`.

        Raises:
            InputError, SamplingError, PromptTooLongError: An argument is invalid.
        """
        encoded, settings = self.prepare(prompts, sampling, options, attention_mask)
        n = settings.sampling.n
        results: list[list[Generation]] = []
        for start in range(0, len(encoded.ids), self.batch_size):
            run = Run(self.parts, encoded.ids[start : start + self.batch_size], settings, start)
            for emissions in self._decode(run):
                if on_step is not None:
                    for emission in emissions:
                        on_step(start * n + run.rows.index(emission.row), emission.step)
            results.extend(run.results())
        flat = [texts if n > 1 else texts[0] for texts in results]
        return flat[0] if encoded.single else flat

    def stream(
        self, prompt: Any, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Return an iterator over pieces of text as they are verified, for one prompt and sample.

        See `generate` for the arguments.

        Raises:
            InputError, SamplingError, PromptTooLongError: An argument is invalid.
        """
        if self.tokenizer is None:
            raise InputError("stream() yields text but the engine has no tokenizer; pass one")
        encoded, settings = self.prepare(prompt, sampling, options)
        if not encoded.single or settings.sampling.n > 1:
            raise InputError(
                f"stream() got {len(encoded.ids)} prompts with n={settings.sampling.n}; expected "
                "one prompt and n=1. Use generate() for several."
            )
        run = Run(self.parts, encoded.ids, settings, 0)
        return Stream(run, self._decode(run), self.tokenizer, settings.stop.strings)

    @property
    def parts(self) -> Parts:
        """The parts that a new call uses."""
        return Parts(self.target, self.drafter, self.rule, self.budget, self.cost, self.tokenizer)

    def on_finish(self, callback: Callable[[Generation], None]) -> Callable[[], None]:
        """Call `callback` with every finished text; return a function that unsubscribes it.

        Cancelled and paused texts are left out. An error of the callback becomes a RuntimeWarning
        and never reaches the caller of `generate` or `stream`.
        """
        key = object()
        with self._listening:
            self._listeners = self._listeners | {key: callback}

        def unsubscribe() -> None:
            with self._listening:
                self._listeners = {k: v for k, v in self._listeners.items() if k is not key}

        return unsubscribe

    def aside(self) -> Engine:
        """Return a copy without `on_finish` callbacks, for texts that may be discarded.

        Call `notify` of this engine with the final text.
        """
        other = copy.copy(self)
        other._listeners = {}
        return other

    def drafting(
        self,
        drafter: str | Drafter | Sequence[str | Drafter] | None,
        budget: str | int | BudgetPolicy = "auto",
    ) -> Engine:
        """Return an engine over the same target with another drafter, without callbacks.

        The rule is `walk`. The cost of forwards is not measured again.

        Args:
            drafter, budget: As for `Engine`.

        Raises:
            TokenizerMismatchError, UnknownNameError, RuleError, InputError: As for `Engine`.
        """
        other = self.aside()
        other._configure_drafting(drafter, None, budget, None, None)
        return other

    def _configure_drafting(
        self,
        drafter: str | Drafter | Sequence[str | Drafter] | None,
        draft_model: Any,
        budget: str | int | BudgetPolicy,
        rule: str | Rule | None,
        cache: Path | None,
    ) -> None:
        """Set drafter, budget and rule; a measured cost curve is kept."""
        self.drafter = build_drafter(drafter, draft_model, self.tokenizer, self.target)
        self.budget = make_budget(budget)
        rule = "walk" if rule is None else rule
        self.rule = expect_rule(resolve("rule", rule)() if isinstance(rule, str) else rule)
        if self.drafter is None:
            return
        check_pairing(self.rule, self.drafter)
        _check_ranks(self.model, self.budget)
        if self.cost is None or not self.budget.needs_cost:
            self.cost = read_cost(self.target, self.budget, cache)

    def notify(self, generation: Generation) -> None:
        """Call the `on_finish` callbacks with a text, unless it was cancelled or has paused."""
        if generation.finish_reason in ("cancelled", "paused"):
            return
        for listener in tuple(self._listeners.values()):
            try:
                listener(generation)
            except Exception as error:
                warnings.warn(
                    f"a callback of on_finish failed ({type(error).__name__}: {error}); the "
                    "output is not affected.",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def prepare(
        self,
        prompts: Any,
        sampling: Sampling | None,
        options: Options,
        attention_mask: Tensor | None = None,
    ) -> tuple[EncodedPrompts, RowSettings]:
        """Check the arguments of `generate`; return the token ids and the settings of all rows.

        Raises:
            InputError, SamplingError, PromptTooLongError: An argument is invalid.
        """
        encoded = encode_prompts(prompts, self.tokenizer, self.target.input_size, attention_mask)
        for ids in encoded.ids:
            self.target.check_prompt(ids)
        return encoded, read_options(
            options,
            Sampling() if sampling is None else sampling,
            encoded.ids,
            ends=end_tokens(self.model, self.tokenizer),
            vocab_size=self.target.vocab_size,
            limit=self.target.max_length,
            tokenizer=self.tokenizer,
            defaults=self.target.generation_config,
        )

    @contextmanager
    def _open(self, run: Run, capacity: int) -> Iterator[TargetSession]:
        """Open a session for a run; the tokens of its prefix cache need not be read."""
        cache, prefix = run.settings.prefix_cache, run.settings.prefix
        if cache is None:
            with self.target.open(len(run.rows), capacity) as session:
                yield _summary(session, run)
            return
        row = run.rows[0]
        with cache.open(self.target, row.context.tokens, capacity, prefix) as (lent, cached):
            row.slot, row.pending = 0, row.context.tokens[cached:]
            row.report.cached = cached
            yield _summary(lent, run)

    def _decode(self, run: Run) -> Iterator[list[Emission]]:
        capacity = max(len(row.context.tokens) + row.context.remaining for row in run.rows)
        began = time.perf_counter()
        try:
            with self._open(run, capacity + run.spare) as session:
                yield from decode(session, run.rows, run.prompt_of_row, self.rule, run.forward)
        finally:
            run.close(time.perf_counter() - began)
            for texts in run.results() if self._listeners else ():
                for generation in texts:
                    self.notify(generation)


def _summary(session: TargetSession, run: Run) -> TargetSession:
    """Set the session's `on_read` to that of this run, and return the session."""
    if isinstance(session, CachedSession):
        session.on_read = run.settings.on_read
    return session


def _check_ranks(model: Any, budget: BudgetPolicy) -> None:
    """Raise InputError if each rank of a model would draft by its own clock.

    Forwards over split weights wait for each other: if ranks verified different trees, all of them
    would hang.
    """
    ranks = rank_count(model)
    if ranks > 1 and budget.needs_cost:
        raise InputError(
            f"got budget={budget.name!r}, which goes by each process's own clock, for a model cut "
            f"among {ranks} ranks; expected one that is the same on all of them. Give a number of "
            "draft nodes."
        )
