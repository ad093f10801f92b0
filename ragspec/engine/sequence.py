"""A sequence: the state of one request while its text is generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.forward_cost import ForwardCost, SharedForward
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession
from ragspec.drafters.build import with_prediction
from ragspec.drafters.combined import required_transform
from ragspec.engine.output import Generation
from ragspec.engine.request import Request
from ragspec.errors import InputError
from ragspec.models.device import without_autograd
from ragspec.needs import Needs, match
from ragspec.reports.builder import ReportBuilder
from ragspec.reports.report import label_under, rounds
from ragspec.rules.base import Rule, Step
from ragspec.rules.target_view import RowView
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream, fresh_seed
from ragspec.sampling.processors import build_processors, default_processors
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.stopping import StopState
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.verification.causal import CausalTarget

OpenView = Callable[..., RowView]
MOST_NODES = 64  # room of a cache for a draft


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that one request uses.

    Attributes:
        cost: That of the target's forwards, None if no policy needs it.
        tokenizer: None for token ids only.
    """

    target: CausalTarget
    drafter: Drafter | None
    rule: Rule
    budget: BudgetPolicy
    cost: ForwardCost | None
    tokenizer: Any


@dataclass(slots=True, eq=False)
class Sequence:
    """The state of one sequence: its tokens, distribution, drafter and stop state.

    Attributes:
        needs: The needs of the drafter.
        hidden: Whether the drafter learns from the target's hidden states.
        transform, distribution_name: The transform of the target's distribution and its name.
        transform_reads: Whether the transform needs the target's hidden states.
        open_view: Makes the rule's view of a forward; some targets, such as those of continuous
            latents, have their own.
        pending: Committed tokens that the target has not read, the root last.
        rule: The rule that judges this sequence's drafts.
        slot: The row of the session, None for none.
        states: Hidden states of the prompt [copies, T, H], if a prefill was to return them.
        error: The error that ended the sequence.
        reason: Why the sequence goes on without its drafter, None for no such reason.
        failures: Failed commits, after each of which the sequence was read again.
        scored: Log-probabilities of the emitted tokens.
        started, finished: Seconds of the performance counter.
    """

    request: Request
    parts: Parts
    context: DraftContext
    distribution: TokenDistribution
    stop: StopState
    report: ReportBuilder
    rule: Rule
    drafter: DraftSession | None = None
    budget: BudgetSession | None = None
    needs: Needs = field(default_factory=Needs)
    hidden: bool = False
    transform: RowTransform | None = None
    distribution_name: str | None = None
    transform_reads: bool = False
    open_view: OpenView = RowView
    pending: list[int] = field(default_factory=list)
    slot: int | None = None
    states: torch.Tensor | None = None
    error: BaseException | None = None
    reason: str | None = None
    failures: int = 0
    steps: list[Step] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    started: float = field(default_factory=time.perf_counter)
    finished: float = 0.0

    @property
    def done(self) -> bool:
        """Whether the text has ended."""
        return self.stop.reason is not None or self.error is not None

    @property
    def label(self) -> str:
        """The guarantee of the text, rounding aside."""
        return label_under(self.rule.label, self.distribution_name)

    @property
    def reads_hidden(self) -> bool:
        """Whether the drafter or the transform needs the target's hidden states."""
        return self.hidden or self.transform_reads

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
        """Return the generation so far."""
        tokens = self.context.tokens[self.context.prompt_length :]
        seconds = (self.finished or time.perf_counter()) - self.started
        reason, budget = self.stop.reason or "cancelled", self.budget
        report = self.report.build(
            tokens[len(self.request.resume_from) :],
            seconds,
            reason,
            budget=self.parts.budget.name if budget is not None else "none",
            faults=None if self.drafter is None else self.drafter.faults,
            reason=self.reason or (budget.reason if budget is not None else None),
            rested=None if self.context.adviser is None else self.context.adviser.rested,
            drift=None if self.transform is None else self.transform.drift,
            static=self.parts.target.static,
        )
        return Generation(
            text=self.stop.text,
            tokens=tokens,
            finish_reason=reason,
            label=report.label,
            report=report,
            prompt_tokens=list(self.request.prompt),
            logprobs=self.scored if self.request.logprobs is not None else None,
            steps=self.steps,
            sample=self.request.sample,
        )


@without_autograd
def open_sequence(parts: Parts, request: Request, forward: SharedForward) -> Sequence:
    """Return the sequence of a request, its drafter opened.

    Args:
        forward: The forward that the budgets of all sequences share.

    Raises:
        InputError: The request and the drafter each bring a transform, or `resume_from` goes on
            after the end of its text.
    """
    target, stop, prompt = parts.target, request.stop, list(request.prompt)
    seed = fresh_seed() if request.seed is None else request.seed
    ids = torch.tensor([prompt], device=target.device)
    limit, ends = len(prompt) + stop.max_new_tokens, sorted(stop.ends)
    current = default_processors(request.defaults, ids, limit, ends, target.vocab_size)
    distribution = TokenDistribution(
        request.sampling,
        NoiseStream(seed, request.sample),
        len(prompt),
        build_processors(request.sampling, len(prompt), ends, current, request.processors),
    )
    changes = _transform_of(request.transform, parts.drafter)
    transform, name = None, None
    if changes is not None:
        start = TextStart(distribution, request.prompt, target.vocab_size, request.draft_prompt)
        match(f"transform {changes.name!r}", changes.needs, target.capabilities)
        transform, name = changes.open(start), changes.name
    tokens = [*prompt, *request.resume_from]
    rounded = parts.drafter is not None
    label = label_under(parts.rule.label, name)
    sequence = Sequence(
        request,
        parts,
        context=DraftContext(tokens, len(prompt), stop.room(len(request.resume_from))),
        distribution=distribution,
        stop=stop.open(parts.tokenizer, prompt, request.resume_from),
        report=ReportBuilder(
            label, seed, len(prompt), rounded and rounds(target.dtype, target.device)
        ),
        rule=parts.rule.open(),
        transform=transform,
        distribution_name=name,
        transform_reads=changes is not None and changes.needs.hidden_states,
        open_view=target.open_view,
        pending=list(tokens),
    )
    ends_at_once = sequence.done or sequence.context.remaining <= 1  # there is nothing to draft
    sequence.hidden = request.prefill and request.states
    if parts.drafter is not None and not (ends_at_once or request.prefill):
        _open_drafter(sequence, parts, forward)
    return sequence


def _open_drafter(sequence: Sequence, parts: Parts, forward: SharedForward) -> None:
    """Open the drafter and the budget of a sequence."""
    request, target, drafter = sequence.request, parts.target, parts.drafter
    assert drafter is not None
    if request.predicted:
        drafter = with_prediction(drafter, parts.rule)
    sequence.drafter = drafter.open(
        DraftRequest(
            prompt=tuple(sequence.context.tokens),
            vocab_size=target.vocab_size,
            spans=request.spans,
            texts=request.texts,
            distribution=sequence.distribution,
            draft_prompt=request.draft_prompt,
            known_states=request.known_states,
            static=target.static,
        )
    )
    sequence.needs = drafter.needs
    sequence.hidden = drafter.needs.hidden_states
    sequence.budget = parts.budget.open(parts.cost, forward)
    sequence.context.adviser = sequence.budget


def _transform_of(request: Transform | None, drafter: Drafter | None) -> Transform | None:
    """Return the transform of a request: its own, or the one that the drafter requires."""
    transform: Transform | None = required_transform(drafter)
    if transform is not None and request is not None and transform is not request:
        raise InputError(
            f"got transform={request.name!r} with a drafter that changes the distribution itself "
            f"({transform.name!r}); expected one of them."
        )
    return transform if request is None else request
