"""A sequence: the state of one request while its text is generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.forward_cost import ForwardCost
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.build import with_prediction
from ragspec.engine.request import Request
from ragspec.errors import InputError, RuleError
from ragspec.models.quantized import weights_of
from ragspec.needs import Needs, match
from ragspec.reports.generation import Generation, report_of
from ragspec.reports.report import label_of, label_under
from ragspec.rules.base import Rule, Step
from ragspec.rules.target_view import RowView
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream
from ragspec.sampling.processors import build_processors, default_processors
from ragspec.sampling.settings import TokenLogprob, fresh_seed
from ragspec.sampling.stopping import StopState
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.verification.causal import CausalTarget

MOST_NODES = 64  # room of a cache for a draft


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that one request uses.

    Attributes:
        cost: That of the target's forwards, None if no policy needs it.
        tokenizer: None for token ids only.
        transform: The transform that the drafter requires, None for none.
    """

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
        rule: The rule that judges this sequence's drafts.
        needs: The needs of the drafter.
        transform, distribution_name: The transform of the target's distribution and its name.
        transform_taps: The hidden states that it reads, see `Needs.hidden_states`.
        open_view: Makes the rule's view of a forward; some targets, such as those of continuous
            latents, have their own.
        pending: Committed tokens that the target has not read, the root last.
        slot: The row of the session, None for none.
        error: The error that ended the sequence.
        reason: Why the sequence goes on without its drafter, None for no such reason.
        failures: Failed commits, after each of which the sequence was read again.
        scored: Log-probabilities of the emitted tokens.
        cached: Prompt tokens whose keys and values were cached before.
        prefill_ms, prefill_forwards: Time and number of the forwards over the prompt.
        started, finished: Seconds of the performance counter, 0 until then.

    Raises:
        InputError: `resume_from` goes on after the end of its text.
    """

    distribution: TokenDistribution  # from `begin` on

    def __init__(self, request: Request, parts: Parts) -> None:
        tokens = [*request.prompt, *request.resume_from]
        room = request.stop.room(len(request.resume_from))
        self.request = request
        self.parts = parts
        self.seed = fresh_seed() if request.seed is None else request.seed
        self.context = DraftContext(tokens, len(request.prompt), room)
        self.stop = StopState(request.stop, parts.tokenizer, request.prompt, request.resume_from)
        self.rule = parts.rule
        self.drafter: DraftSession | None = None
        self.budget: BudgetSession | None = None
        self.needs = Needs()
        self.transform: RowTransform | None = None
        self.transform_taps: tuple[int, ...] = ()
        self.distribution_name: str | None = None
        self.open_view: Callable[..., RowView] = RowView
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
        """Open distribution, rule and drafter.

        Raises:
            InputError: The request and the drafter each bring a transform.
        """
        request, target = self.request, self.parts.target
        prompt, ends = list(request.prompt), sorted(request.stop.ends)
        self.started = time.perf_counter()
        ids = torch.tensor([prompt], device=target.device)
        limit = len(prompt) + request.stop.max_new_tokens
        current = default_processors(request.defaults, ids, limit, ends, target.vocab_size)
        self.distribution = TokenDistribution(
            request.sampling,
            NoiseStream(self.seed, request.sample),
            len(prompt),
            build_processors(request.sampling, len(prompt), ends, current, request.processors),
        )
        self.rule = self.parts.rule.open()
        self.open_view = target.open_view
        self._open_transform()
        if not (request.prefill or self.done or self.context.remaining <= 1):
            self._open_drafter()

    def _open_transform(self) -> None:
        """Open the transform of the request, or else the one that the drafter requires."""
        request, target, required = self.request, self.parts.target, self.parts.transform
        transform = required if request.transform is None else request.transform
        if transform is None:
            return
        if required is not None and transform is not required:
            raise InputError(
                f"got transform={transform.name!r} with a drafter that changes the distribution "
                f"itself ({required.name!r}); expected one of them."
            )
        match(f"transform {transform.name!r}", transform.needs, target.capabilities)
        self.transform = transform.open(
            TextStart(self.distribution, request.prompt, target.vocab_size, request.draft_prompt)
        )
        self.distribution_name = transform.name
        self.transform_taps = transform.needs.hidden_states

    def _open_drafter(self) -> None:
        """Open the drafter and the budget, if there is a drafter."""
        request, parts, drafter = self.request, self.parts, self.parts.drafter
        if drafter is None:
            return
        if request.predicted:
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
    def reads_hidden(self) -> set[int]:
        """The hidden states that drafter and transform need, see `Needs.hidden_states`."""
        return {*self.needs.hidden_states, *self.transform_taps}

    @property
    def room(self) -> int:
        """Tokens that may follow those that are pending, a draft included."""
        return self.context.remaining + (MOST_NODES if self.drafter is not None else 1)

    def drop_drafter(self, error: BaseException) -> None:
        """Go on without a drafter that failed; the report says why."""
        self.drafter = None
        self.reason = f"the drafter failed ({type(error).__name__}: {error})"

    def end(self) -> None:
        """Count a text that has not ended as cancelled."""
        if self.stop.reason is None:
            self.stop.reason = "cancelled"
        self.finished = self.finished or time.perf_counter()

    def generation(self) -> Generation:
        """Return the generation so far.

        Raises:
            RuleError: The drafter changed tokens of its context in place.
        """
        request, parts, budget = self.request, self.parts, self.budget
        tokens = [*request.resume_from, *(token for step in self.steps for token in step.tokens)]
        if self.context.tokens != [*request.prompt, *tokens]:
            raise RuleError(
                "the drafter changed tokens of its context; expected them unchanged. Copy "
                "`context.tokens` before changing them."
            )
        began = self.started > 0
        seconds = (self.finished or time.perf_counter()) - self.started if began else 0.0
        drafts = began and parts.drafter is not None
        rounded = drafts and parts.target.rounds
        report = report_of(
            self.steps,
            tokens[len(request.resume_from) :],
            seconds,
            self.stop.reason or "cancelled",
            prefill=(self.prefill_ms, self.prefill_forwards),
            reason=self.reason or (budget.reason if budget is not None else None),
            label=label_of(label_under(self.rule.label, self.distribution_name), rounded),
            seed=self.seed,
            prompt_tokens=len(request.prompt),
            cached_tokens=self.cached,
            budget=parts.budget.name if budget is not None else "none",
            faults={} if self.drafter is None else dict(self.drafter.faults),
            rested={} if self.context.adviser is None else dict(self.context.adviser.rested),
            drift=None if self.transform is None else self.transform.drift,
            static=parts.target.static,
            runtime=parts.target.runtime,
            weights=weights_of(parts.target.loaded),
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
