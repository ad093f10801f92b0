"""A sequence: the state of one request while its text is generated."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.forward_cost import ForwardCost
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.build import with_prediction
from ragspec.engine.request import Request
from ragspec.errors import InputError, RuleError
from ragspec.models.device import out_of_memory
from ragspec.needs import Needs, match
from ragspec.reports.generation import Generation, report_of
from ragspec.reports.report import label_of
from ragspec.rules.base import Rule, Step
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.processors import build_processors, default_processors
from ragspec.sampling.settings import TokenLogprob, fresh_seed
from ragspec.sampling.stopping import StopState
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.trees.draft_tree import PREDICTION
from ragspec.verification.causal import CausalTarget

P = ParamSpec("P")
T = TypeVar("T")
MOST_NODES = 64  # room of a cache for a draft


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that one request uses."""

    target: CausalTarget
    drafter: Drafter | None
    rule: Rule
    budget: BudgetPolicy
    cost: ForwardCost | None
    tokenizer: Any
    transform: Transform | None = None


class Sequence:
    """The state of one sequence: its tokens, distribution, drafter and stop state.

    Attributes:
        change, transform: The change of the target's distribution, that of the request or else the
            one that the drafter requires, and its state from `begin` on; None for none.
        transform_taps: The hidden states that it reads, see `Needs.hidden_states`.
        pending: Committed tokens that the target has not read, the root last.
        slot: The row of the session, None for none.
        reason: Why the sequence goes on without its drafter, None for no such reason.
        failures: Failed commits, after each of which the sequence was read again.
        scored: Log-probabilities of the emitted tokens.
        cached: Prompt tokens whose keys and values were cached before.
        prefill_ms, prefill_forwards: Time and number of the forwards over the prompt.
        started, finished: Seconds of the performance counter, 0 until then.
    """

    distribution: TokenDistribution  # from `begin` on

    def __init__(self, request: Request, parts: Parts) -> None:
        tokens = [*request.prompt, *request.resume_from]
        self.request, self.parts = request, parts
        self.seed = fresh_seed() if request.seed is None else request.seed
        self.stop = StopState(request.stop, parts.tokenizer, request.prompt, request.resume_from)
        self.context = DraftContext(tokens, len(request.prompt), self.stop.last - self.stop.count)
        self.rule = parts.rule
        self.drafter: DraftSession | None = None
        self.budget: BudgetSession | None = None
        self.needs = Needs()
        self.change = parts.transform or request.transform
        self.transform: RowTransform | None = None
        self.transform_taps = () if self.change is None else self.change.needs.hidden_states
        self.pending = list(tokens)
        self.slot: int | None = None
        self.error: BaseException | None = None
        self.reason: str | None = None
        self.failures = 0
        self.steps: list[Step] = []
        self.scored: list[TokenLogprob] = []
        self.cached = 0
        self.prefill_ms, self.prefill_forwards = 0.0, 0
        self.started = self.finished = 0.0

    def begin(self) -> None:
        """Open distribution, its change, rule, and drafter if no processor's state could suffer."""
        request, target = self.request, self.parts.target
        self.started = time.perf_counter()
        self.distribution = open_distribution(request, target, self.seed)
        self.rule = self.parts.rule.open()
        if (change := self.change) is not None:
            if request.transform is not None and request.transform is not change:
                raise InputError(
                    f"got transform={request.transform.name!r} with a drafter that changes the "
                    f"distribution itself ({change.name!r}); expected one of them."
                )
            match(f"transform {change.name!r}", change.needs, target.capabilities)
            prompts = request.prompt, target.vocab_size, request.draft_prompt
            self.transform = change.open(TextStart(self.distribution, *prompts))
        drafter = self.parts.drafter
        if drafter is not None and not self.done and self.context.remaining > 1:
            if self.rule.needs.ahead and request.processors:
                self.reason = f"rule {self.rule.name!r} may spoil the state of a logits_processor"
            else:
                self._open_drafter(drafter)

    def _open_drafter(self, drafter: Drafter) -> None:
        """Open the drafter and the budget."""
        request, parts = self.request, self.parts
        if any(text.document == PREDICTION for text in request.texts):
            drafter = with_prediction(drafter, parts.rule)
        self.drafter = drafter.open(
            DraftRequest(
                prompt=tuple(self.context.tokens),
                vocab_size=parts.target.vocab_size,
                spans=request.spans,
                texts=request.texts,
                distribution=self.distribution,
                draft_prompt=request.draft_prompt,
                static=parts.target.static,
                owner=request.tenant if type(self.rule) is Walk else None,
                chains=parts.target.chains,
            )
        )
        self.needs = drafter.needs
        self.budget = parts.budget.open(parts.cost)
        self.context.adviser = self.budget

    @property
    def done(self) -> bool:
        """Whether the text has ended."""
        return self.stop.reason is not None or self.error is not None

    @property
    def follows(self) -> bool:
        """Whether its rule takes the target's own tokens, by their own distribution."""
        usual = self.parts.target.open_view is RowView and self.transform is None
        return usual and type(self.rule) is Walk

    def drop_drafter(self, error: Exception) -> None:
        """Go on without a drafter for which memory ran out, as reported; raise other errors."""
        if not out_of_memory(error):
            raise error
        self.drafter = None
        self.reason = f"the drafter failed ({type(error).__name__}: {error})"

    def generation(self) -> Generation:
        """Return the generation so far; a text that has not ended counts as cancelled."""
        request, parts, budget = self.request, self.parts, self.budget
        tokens = [*request.resume_from, *(token for step in self.steps for token in step.tokens)]
        if self.context.tokens != [*request.prompt, *tokens]:
            raise RuleError(
                "the drafter changed tokens of its context; expected them unchanged. Copy "
                "`context.tokens` before changing them."
            )
        change = None if self.change is None else self.change.name
        began = self.started > 0
        seconds = (self.finished or time.perf_counter()) - self.started if began else 0.0
        wider = parts.drafter is not None or bool(request.resume_from)  # forwards than plain ones
        rounded = began and wider and parts.target.rounds
        report = report_of(
            self.steps,
            tokens[len(request.resume_from) :],
            seconds,
            self.stop.reason or "cancelled",
            prefill=(self.prefill_ms, self.prefill_forwards),
            reason=self.reason or (budget.reason if budget is not None else None),
            label=label_of(self.rule.label, rounded, change),
            seed=self.seed,
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached,
            budget=parts.budget.name if budget is not None else "none",
            faults={} if self.drafter is None else dict(self.drafter.faults),
            rested={} if self.context.adviser is None else dict(self.context.adviser.rested),
            drift=None if self.transform is None else self.transform.drift,
            static=parts.target.static,
            runtime=parts.target.runtime,
            weights=parts.target.weights,
        )
        return Generation(
            text=self.stop.text,
            tokens=tokens,
            finish_reason=report.finish_reason,
            label=report.label,
            report=report,
            prompt_tokens=list(request.prompt),
            logprobs=self.scored if request.logprobs is not None else None,
            steps=self.steps,
            sample=request.sample,
        )


def open_distribution(request: Request, target: CausalTarget, seed: int) -> TokenDistribution:
    """Return the distribution of a request's tokens over the target's logits."""
    prompt, ends = list(request.prompt), sorted(request.stop.ends)
    ids = torch.tensor([prompt], device=target.device)
    limit = len(prompt) + request.stop.max_new_tokens
    current = default_processors(request.defaults, ids, limit, ends, target.vocab_size)
    processors = build_processors(request.sampling, len(prompt), ends, current, request.processors)
    noise = NoiseStream(seed, request.sample)
    return TokenDistribution(request.sampling, noise, len(prompt), processors)


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is the user's Ctrl-C, which arrives in the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    return main and isinstance(error, KeyboardInterrupt)


def attempt(row: Sequence, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T | None:
    """Call a function for a sequence; an error ends it, an interrupt (Ctrl-C) is raised."""
    try:
        return call(*args, **kwargs)
    except BaseException as error:
        if is_interrupt(error):
            raise
        row.error = error
        return None
