"""The engine: a model, its tokenizer, a drafter and a budget, ready to generate."""

import copy
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy  # noqa: F401 - torch would lose an interrupt while it imports this
import torch
from torch import Tensor

from ragspec.budget.base import BudgetPolicy
from ragspec.budget.forward_cost import ForwardCost
from ragspec.budget.goodput import make_budget
from ragspec.drafters.build import DrafterSpec, DraftModel, build_drafter, with_head
from ragspec.drafters.fuse import match_drafter, required_transform
from ragspec.engine.handle import RequestHandle, Stream, call_or_warn
from ragspec.engine.kv_memory import KvMemory
from ragspec.engine.prompts import Prompts
from ragspec.engine.request import OnRead, Options, Request, read_requests
from ragspec.engine.scheduler import CHUNK, Scheduler
from ragspec.engine.sequence import Parts, Sequence
from ragspec.errors import InputError
from ragspec.models.load import DeviceMap
from ragspec.models.supported import rank_count
from ragspec.needs import Needs, match
from ragspec.registry import expect_known, resolve
from ragspec.reports.generation import Generation
from ragspec.rules.base import Rule, expect_rule
from ragspec.sampling.settings import Sampling, checked_count
from ragspec.types import PreTrainedModel, Tokenizer
from ragspec.verification.causal import CausalTarget, Model
from ragspec.verification.open import load_target, open_target
from ragspec.verification.prefix_cache import PrefixCache

BudgetSpec = str | int | BudgetPolicy
RuleSpec = str | Rule | None
# Further ones of `from_pretrained`, first those of `load_target`.
OPTIONS = ("adapter", "static", "runtime", "rule", "max_batch_size")


class Engine(AbstractContextManager["Engine", None]):
    """Generates text from one model, with or without speculation.

    Args:
        model: A transformers causal model, which is not changed, or a `CausalTarget` over one, such
            as `open_target` returns.
        tokenizer: The model's tokenizer; None for token ids only.
        drafter: A name, a `Drafter`, a list of these (fused into one tree), or None for plain
            decoding.
        draft_model: A smaller model of the same vocabulary (object, path or name) that drafts too.
        budget: Draft nodes per step: "auto", a number, or a `BudgetPolicy`.
        rule: A name or a `Rule`; None for the drafter's, which is usually "walk".
        max_batch_size: Texts decoded in one batch, of all callers together; see `with_limits`.

    Raises:
        UnsupportedModelError, TokenizerMismatchError, UnknownNameError, RuleError, InputError: A
            part is unknown or does not suit the others, or a number is out of range.
    """

    def __init__(
        self,
        model: Model,
        tokenizer: "Tokenizer | None" = None,
        drafter: DrafterSpec = "auto",
        draft_model: DraftModel = None,
        budget: BudgetSpec = "auto",
        rule: RuleSpec = None,
        *,
        max_batch_size: int = 16,
    ) -> None:
        if isinstance(tokenizer, str):
            raise InputError(f"tokenizer is {tokenizer!r}; expected an object. Load it first.")
        self.target = model if isinstance(model, CausalTarget) else open_target(model)
        self.tokenizer: Any = tokenizer
        self.scheduler = Scheduler(self.target, max_batch_size, None, CHUNK)
        self.cost: ForwardCost | None = None
        self._listeners: dict[object, Callable[[Generation], None]] = {}
        self._configure_drafting(drafter, draft_model, budget, rule)

    @property
    def model(self) -> "PreTrainedModel":
        """The model of transformers."""
        return self.target.model

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path = "starter",
        drafter: DrafterSpec = "auto",
        draft_model: DraftModel = None,
        budget: BudgetSpec = "auto",
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        *,
        device_map: DeviceMap = None,
        **options: Any,
    ) -> "Engine":
        """Return an engine over a model given by path or name; see `Engine` for the rest.

        "starter" and "starter-draft" are the bundled models.

        Args:
            device, device_map: See `load_model`.
            options: adapter, see `load_model`; static and runtime, see `open_target`;
                max_batch_size, rule.
            dtype: "float32", "bfloat16", "float16", "int8", "int4" or "auto". On a CPU "auto" is
                float32, and "int8" for models of 100 million weights that ONNX Runtime can run; on
                an accelerator it is the checkpoint's.

        Raises:
            MissingModelError: No model was found; the message lists the places that were tried.
        """
        expect_known("argument", options, OPTIONS)
        settings = {name: options.pop(name) for name in OPTIONS[:3] if name in options}
        target, tokenizer = load_target(model, device, dtype, device_map=device_map, **settings)
        return cls(target, tokenizer, drafter, draft_model, budget, **options)

    def generate(
        self,
        prompts: Prompts,
        sampling: Sampling | None = None,
        *,
        attention_mask: Tensor | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Return a `Generation` for one prompt, a list of them for several.

        The default is greedy decoding. The model's generation config fills in the settings that
        `sampling` leaves open: penalties, forbidden, forced and suppressed tokens, stop strings.
        Greedy text is then that of transformers. Autocast does not apply: cast the model instead.

        Args:
            prompts: Text, chat messages, token ids, or a batch of one of these.
            sampling: Sampling settings; with n > 1 every prompt gives a list of n.
            attention_mask: Marks padding of token ids, [B, T].
            **options: See `Options`.

        Raises:
            InputError, SamplingError, PromptTooLongError: An argument is invalid.
        """
        requests, single = self.prepare(prompts, sampling, options, attention_mask)
        owner = object()
        with ExitStack() as stack:
            handles = [self._handle(each, owner) for each in requests]
            for handle in handles:
                stack.enter_context(closing(handle))  # before an interrupt (Ctrl-C) can leave it
                self.scheduler.add(handle)

            def ended() -> bool:
                failed = any(handle.done and handle.future.exception() for handle in handles)
                return failed or all(handle.done for handle in handles)

            self.scheduler.drive(owner, ended)
            texts: list[Any] = [handle.future.result() for handle in handles if handle.done]
        if (n := requests[0].sampling.n) > 1:
            texts = [texts[start : start + n] for start in range(0, len(texts), n)]
        return texts[0] if single else texts

    def stream(
        self, prompt: Prompts, sampling: Sampling | None = None, **options: Unpack[Options]
    ) -> Stream:
        """Return an iterator over pieces of text as they are verified, for one prompt and sample.

        Arguments and errors are those of `generate`. Each piece that is asked for takes a step.
        """
        handle = self._handle(self._one("stream()", prompt, sampling, options), object())
        stream = handle.stream()  # if an interrupt drops it, it leaves no request
        self.scheduler.add(handle)
        return stream

    def submit(
        self,
        prompt: Prompts,
        sampling: Sampling | None = None,
        *,
        sample: int = 0,
        **options: Unpack[Options],
    ) -> RequestHandle:
        """Queue a request and return its handle at once; a thread of the engine decodes it.

        Args:
            prompt, sampling, **options: As for `generate`; one prompt and n=1.
            sample: Which of the n samples of a prompt this is, from 0; each is its own request.

        Raises:
            QueueFullError: Too many requests wait.
            EngineClosedError: The engine was closed; also the errors of `generate`.
        """
        request = self._one("submit()", prompt, sampling, options)
        return self.add(replace(request, sample=checked_count(sample, "sample", 0)))

    def add(self, request: Request, owner: object | None = None) -> RequestHandle:
        """Queue a request of `prepare`; return its handle, by which its owner takes the steps.

        Without an owner, as for `submit`, a thread of the engine takes them.
        """
        handle = self._handle(request, owner)
        self.scheduler.add(handle)
        return handle

    def _handle(self, request: Request, owner: object | None) -> RequestHandle:
        """Return the handle of a request that the scheduler does not have yet."""

        def notify(future: Future[Generation]) -> None:
            if future.exception() is None:
                self.notify(future.result())

        handle = RequestHandle(Sequence(request, self.parts), self.scheduler, owner)
        handle.future.add_done_callback(notify)
        return handle

    def step(self) -> bool:
        """Take one step for all requests in this thread; return whether any are left."""
        self.scheduler.step()
        return self.scheduler.open_requests > 0

    def close(self, *, cancel: bool = False, timeout: float | None = None) -> None:
        """Take no more requests and wait until all have ended.

        Args:
            cancel: Cancel running texts after the current step.
            timeout: Seconds after which the remaining texts are cancelled, None for no limit.
        """
        self.scheduler.close(cancel=cancel, timeout=timeout)

    def __exit__(self, *raised: object) -> None:
        self.close(cancel=raised[0] is not None)

    def prefill(self, prompt: Prompts, *, tenant: str = "", on_read: OnRead | None = None) -> None:
        """Read a prompt into the prefix cache, whose keys and values later requests share.

        For `tenant` and `on_read` see `Options`; the errors are those of `generate`.
        """
        options: Options = {"tenant": tenant, "on_read": on_read, "max_new_tokens": 1}
        request = self._one("prefill()", prompt, None, options)
        with closing(self.without_callbacks()._handle(request, object())) as handle:
            self.scheduler.add(handle)
            handle.result()

    def _one(
        self, name: str, prompt: Prompts, sampling: Sampling | None, options: Options
    ) -> Request:
        """Return the request of one prompt and sample; raise InputError for several."""
        requests, single = self.prepare(prompt, sampling, options)
        n = requests[0].sampling.n
        if not single or n > 1:
            raise InputError(
                f"{name} got {len(requests) // n} prompts with n={n}; expected one prompt and "
                "n=1. Use generate() for several."
            )
        return requests[0]

    @property
    def prefix_cache(self) -> PrefixCache:
        """Keys and values of earlier texts, by token prefix and tenant."""
        return self.scheduler.prefix_cache

    @property
    def parts(self) -> Parts:
        """The parts that a new call uses."""
        drafting = self.drafter, self.rule, self.budget, self.cost
        return Parts(self.target, *drafting, self.tokenizer, self._transform)

    def on_finish(self, callback: Callable[[Generation], None]) -> Callable[[], object]:
        """Call `callback` with every finished text; return a function that unsubscribes it.

        Cancelled and paused texts are left out. An error of the callback becomes a RuntimeWarning
        and never reaches the caller of `generate` or `stream`.
        """
        key = object()
        self._listeners[key] = callback
        return partial(self._listeners.pop, key, None)

    def without_callbacks(self) -> "Engine":
        """Return a copy without `on_finish` callbacks, for texts that may be discarded."""
        other = copy.copy(self)
        other._listeners.clear()
        return other

    def __copy__(self) -> "Engine":
        """Return an engine over the same scheduler, with callbacks that change apart."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _listeners=dict(self._listeners))
        return other

    def with_drafter(
        self, drafter: DrafterSpec, budget: BudgetSpec = "auto", rule: RuleSpec = None
    ) -> "Engine":
        """Return an engine with another drafter, without callbacks.

        Target, scheduler, prefix cache and the cost of forwards are shared. Arguments and errors
        are those of `Engine`.
        """
        other = self.without_callbacks()
        other._configure_drafting(drafter, None, budget, rule)
        return other

    def with_limits(
        self,
        max_batch_size: int,
        max_queue_size: int | None = None,
        chunk: int = CHUNK,
        *,
        max_model_len: int | None = None,
        kv_memory: int | None = None,
    ) -> "Engine":
        """Return an engine with a scheduler and a prefix cache of its own, without callbacks.

        Args:
            max_batch_size: Texts decoded in one batch.
            max_queue_size: Submitted requests that may wait, None for any number.
            chunk: Tokens of prompts that are read between two steps of running texts.
            max_model_len: Most tokens of a text with its prompt, None for the model's context.
            kv_memory: Most bytes of keys and values, None for no limit: of running texts, each
                with all tokens that it may have, and of the prefix cache. Requests wait for room;
                for one that runs alone, pinned texts are evicted too.
        """
        other, memory = self.without_callbacks(), None
        if max_model_len is not None or kv_memory is not None:
            other.target = copy.copy(self.target)
        target = other.target
        if max_model_len is not None:
            max_model_len = checked_count(max_model_len, "max_model_len")
            if not 2 <= max_model_len <= (target.max_length or max_model_len):
                raise InputError(
                    f"max_model_len is {max_model_len}; expected 2 or more tokens, and at most "
                    f"those of the model's context ({target.max_length})."
                )
            target.max_length = max_model_len
        if kv_memory is not None:
            memory = KvMemory(target, kv_memory, max_batch_size)
            target.max_length = memory.max_length
        other.scheduler = Scheduler(target, max_batch_size, max_queue_size, chunk, memory)
        return other

    def _configure_drafting(
        self, drafter: DrafterSpec, draft_model: DraftModel, budget: BudgetSpec, rule: RuleSpec
    ) -> None:
        """Set drafter, budget and rule; a measured cost is kept."""
        built = build_drafter(drafter, draft_model, self.tokenizer, self.target)
        self.budget = make_budget(budget)
        rule = "walk" if rule is None else rule
        self.rule = expect_rule(resolve("rule", rule)() if isinstance(rule, str) else rule)
        self.drafter = with_head(built, self.target, self.rule)
        self._transform = required_transform(self.drafter)
        name = f"rule {self.rule.name!r}"
        offered = replace(self.target.capabilities, kinds=self.rule.accepts, judge=name)
        match(name, self.rule.needs, offered)
        if self.drafter is not None:
            parts = drafter if isinstance(drafter, list | tuple) else [drafter or "model"]
            name = ", ".join(getattr(each, "name", str(each)) for each in parts)
            match_drafter(self.drafter, offered, name)
            if self.cost is None and self.budget.needs_cost:
                self.cost = copy.deepcopy(self.target.known_cost)
                if self.cost is None:
                    self.measure()

    def measure(self) -> None:
        """Measure the cost of forwards, on which the budget "auto" depends, in about a second.

        Raises:
            InputError: The model is split across ranks, whose forwards wait for each other. If each
                verified other trees, by its own clock, all would hang.
        """
        target, ranks = self.target, rank_count(self.model)
        if ranks > 1:
            raise InputError(
                f"got budget={self.budget.name!r}, which goes by each process's own clock, for a "
                f"model cut among {ranks} ranks; expected one that is the same on all of them. "
                "Give a number of draft nodes."
            )
        self.cost = ForwardCost.probe(target.time_forward, target.max_length, target.widths)

    @property
    def needs(self) -> Needs:
        """The needs of the drafter, empty without one."""
        return Needs() if self.drafter is None else self.drafter.needs

    def notify(self, generation: Generation) -> None:
        """Call the `on_finish` callbacks with a text, unless it was cancelled or has paused."""
        if generation.finish_reason in ("cancelled", "paused"):
            return
        for listener in list(self._listeners.values()):
            call_or_warn(listener, generation)

    def prepare(
        self,
        prompts: Prompts,
        sampling: Sampling | None,
        options: Options,
        mask: Tensor | None = None,
    ) -> tuple[list[Request], bool]:
        """Check the arguments of `generate`; return its requests, see `read_requests`."""
        kind = self.target.device.type
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            warnings.warn(
                "autocast does not apply to an engine, whose texts share a batch and a cache; "
                "expected none. Cast the model instead: model.to(torch.bfloat16).",
                RuntimeWarning,
                stacklevel=3,
            )
        return read_requests(prompts, sampling, options, self.target, self.tokenizer, mask)
