"""The rows of a call of the engine, and the cost curve of its target."""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ragspec.budget.base import BudgetPolicy, BudgetSession
from ragspec.budget.cost_curve import CostCurve, SharedCost, SharedForward, cached, context_lengths
from ragspec.budget.policy import for_one_text
from ragspec.drafters.base import (
    DraftContext,
    Drafter,
    DraftRequest,
    DraftSession,
    needs_hidden,
    reads_prompts,
    top_logits_needed,
)
from ragspec.drafters.build import with_prediction
from ragspec.drafters.combined import required_transform
from ragspec.engine.options import RowSettings
from ragspec.engine.output import Generation
from ragspec.errors import InputError
from ragspec.models.device import without_autograd
from ragspec.reports.builder import ReportBuilder
from ragspec.reports.report import label_under, rounds
from ragspec.rules.base import Rule, Step
from ragspec.rules.target_view import RowView
from ragspec.rules.walk import Walk
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.noise import NoiseStream, fresh_seed
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.stopping import StopState
from ragspec.sampling.transform import RowTransform, TextStart, Transform
from ragspec.storage.filesystem import cache_directory
from ragspec.verification.causal import CausalTarget

LONGEST_TIMED = 8192
_NO_COST = frozenset(
    {"_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version"}
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an engine that one call uses.

    Attributes:
        cost: The target's cost curve, None if no policy needs it.
        tokenizer: None for token ids only.
    """

    target: CausalTarget
    drafter: Drafter | None
    rule: Rule
    budget: BudgetPolicy
    cost: CostCurve | None
    tokenizer: Any


def read_cost(
    target: CausalTarget, budget: BudgetPolicy, cache: Path | None = None
) -> CostCurve | None:
    """Return the target's cost curve, measured once and cached; None if the budget needs none."""
    if not budget.needs_cost:
        return None
    key: dict[str, str | int] = {
        "model": model_identity(target.model),
        "device": _device_name(target.device),
        "dtype": str(target.dtype),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "steps": target.static.split(":")[0],
    }
    lengths = context_lengths(min(target.max_length or LONGEST_TIMED, LONGEST_TIMED))
    return cached(
        cache or cache_directory(), key, target.time_forward, lengths, tuple(target.widths)
    )


def model_identity(model: Any) -> str:
    """Return a hash of a model's configuration and sizes, which is a key for its cost.

    Weights do not count, as two checkpoints of one architecture cost the same. Nor do the entries
    that saving or loading writes into a configuration.
    """
    config = {k: v for k, v in model.config.to_dict().items() if k not in _NO_COST}
    sizes = sorted((name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    text = json.dumps([config, sizes], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _device_name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"cpu {platform.processor() or platform.machine()}"
    return str(torch.get_device_module(device).get_device_name(device))


OpenView = Callable[..., RowView]
MOST_NODES = 64  # room of a cache for a draft


@dataclass(slots=True, eq=False)
class Row:
    """The state of one sequence: its tokens, distribution, drafter and stop state.

    Attributes:
        logprobs: Alternatives to keep with each token's log-probability, None for no such thing.
        top: Number of the target's best tokens from which the drafter learns, 0 for none.
        reads_prompt: Whether it learns from those of the prompt, too.
        hidden: Whether the drafter learns from the target's hidden states.
        transform, distribution_name: The transform of the target's distribution and its name.
        transform_reads: Whether the transform needs the target's hidden states.
        open_view: Makes the rule's view of a forward; some targets, such as those of continuous
            latents, have their own.
        pending: Committed tokens that the target has not read, the root last.
        rule: The rule that judges this row's drafts; the loop opens it.
        slot: The row of the session, None for none.
        scope: Cached tokens are shared within a scope alone, see `TargetSession.join`.
        error: The error that ended the row, if the loop isolates errors.
        scored: Log-probabilities of the emitted tokens.
        started, finished: Seconds of the performance counter.
    """

    context: DraftContext
    distribution: TokenDistribution
    stop: StopState
    report: ReportBuilder
    drafter: DraftSession | None = None
    budget: BudgetSession | None = None
    logprobs: int | None = None
    top: int = 0
    reads_prompt: bool = True
    hidden: bool = False
    transform: RowTransform | None = None
    distribution_name: str | None = None
    transform_reads: bool = False
    open_view: OpenView = RowView
    pending: list[int] = field(default_factory=list)
    rule: Rule = field(default_factory=Walk)
    slot: int | None = None
    scope: str = ""
    error: Exception | None = None
    steps: list[Step] = field(default_factory=list)
    scored: list[TokenLogprob] = field(default_factory=list)
    started: float = 0.0
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


class Run:
    """The rows of some prompts, n rows each, and their generations.

    Args:
        first: Number of the first prompt in the whole call, which selects its seed.
        samples: Which of the n samples of each prompt to make, None for all.
        forward: The forward that these rows share with the others of their loop, None for a new
            one.
    """

    def __init__(
        self,
        parts: Parts,
        prompts: Sequence[list[int]],
        settings: RowSettings,
        first: int,
        samples: Sequence[int] | None = None,
        forward: SharedForward | None = None,
    ) -> None:
        self.began = time.perf_counter()
        self.parts = parts
        self.settings = settings
        self.prompts = prompts
        self.drafter = parts.drafter
        if self.drafter is not None and any(settings.predictions):
            self.drafter = with_prediction(self.drafter, parts.rule)
        self.spare = MOST_NODES if self.drafter is not None else 1
        self.prompt_of_row: list[int] = []
        self.rows: list[Row] = []
        target = parts.target
        drafts = parts.drafter is not None and not target.bit_exact
        self._rounded = drafts and rounds(target.dtype, target.device)
        self.transform = _distribution_of(settings.transform, parts.drafter)
        self.seconds = 0.0
        self.forward = SharedForward() if forward is None else forward
        self._cost = None if parts.cost is None else SharedCost(parts.cost, self.forward)
        for number, prompt in enumerate(prompts):
            seed = settings.sampling.seed_of(first + number)
            seed = fresh_seed() if seed is None else seed
            for sample in range(settings.sampling.n) if samples is None else samples:
                self.prompt_of_row.append(number)
                self.rows.append(self._row(prompt, seed, sample, first + number))

    def close(self, seconds: float) -> None:
        """Set the wall time; rows that have not ended count as cancelled."""
        self.seconds = seconds
        for row in self.rows:
            if row.stop.reason is None:
                row.stop.reason = "cancelled"

    def results(self) -> list[list[Generation]]:
        """Return the generations, one list for each prompt."""
        results: list[list[Generation]] = [[] for _ in self.prompts]
        for row, prompt in zip(self.rows, self.prompt_of_row, strict=True):
            results[prompt].append(self.result(row, self.prompts[prompt]))
        return results

    def result(self, row: Row, prompt: list[int]) -> Generation:
        """Return the generation of one row."""
        tokens = row.context.tokens[row.context.prompt_length :]
        seconds = (row.finished - row.started) if row.finished else self.seconds
        budget, drafter = row.budget, row.drafter
        report = row.report.build(
            tokens[len(self.settings.resume_from) :],
            seconds,
            row.stop.reason or "cancelled",
            budget=self.parts.budget.name if budget is not None else "none",
            faults=getattr(drafter, "faults", None),
            reason=budget.reason if budget is not None else None,
            rested=getattr(row.context.adviser, "rested", None),
            drift=getattr(row.transform, "drift", None),
            static=getattr(self.parts.target, "static", "off"),
        )
        return Generation(
            text=self._text(row, tokens),
            tokens=tokens,
            finish_reason=row.stop.reason or "cancelled",
            label=report.label,
            report=report,
            prompt_tokens=prompt,
            logprobs=row.scored if row.logprobs is not None else None,
            steps=row.steps,
            sample=row.distribution.noise.sample,
        )

    def _text(self, row: Row, tokens: Sequence[int]) -> str:
        if self.parts.tokenizer is None:
            return ""
        text = str(self.parts.tokenizer.decode(tokens, skip_special_tokens=True))
        if row.stop.cut is None:
            return text
        places = [text.find(string) for string in self.settings.stop.strings]
        return text[: min((place for place in places if place >= 0), default=row.stop.cut)]

    @without_autograd
    def _row(self, prompt: list[int], seed: int, sample: int, number: int) -> Row:
        """Return the row of a sample of prompt `number` of the whole call."""
        parts, settings, target = self.parts, self.settings, self.parts.target
        place = number * settings.sampling.n + sample
        ids = torch.tensor([prompt], device=target.device)
        distribution = TokenDistribution(
            settings.sampling,
            NoiseStream(seed, sample),
            len(prompt),
            sorted(settings.stop.ends),
            settings.extra_of(place, (target.model, parts.tokenizer)),
            settings.settings_of(ids, target.vocab_size),
        )
        before = [*prompt, *settings.resume_from]
        changes, transform, name = self.transform, None, None
        if changes is not None:
            size = target.vocab_size
            start = TextStart(distribution, tuple(prompt), size, settings.draft_prompt)
            transform, name = changes.open(start), changes.name
        room, label = settings.stop.room(len(settings.resume_from)), parts.rule.label
        row = Row(
            context=DraftContext(list(before), len(prompt), room),
            distribution=distribution,
            stop=settings.stop_of(place).open(parts.tokenizer, prompt, settings.resume_from),
            report=ReportBuilder(label_under(label, name), seed, len(prompt), self._rounded),
            transform=transform,
            distribution_name=name,
            transform_reads=changes is not None and changes.reads_hidden,
            open_view=getattr(target, "open_view", RowView),
            logprobs=settings.logprobs,
            pending=list(before),
            started=self.began,
        )
        ends = row.done or row.context.remaining <= 1  # there is nothing to draft
        if self.drafter is not None and not ends:
            request = DraftRequest(
                prompt=tuple(before),
                vocab_size=target.vocab_size,
                spans=tuple(settings.spans),
                texts=settings.texts_of(number),
                distribution=distribution,
                draft_prompt=settings.draft_prompt,
                known_states=settings.known_states,
                static=getattr(target, "static", "off"),
            )
            row.drafter = self.drafter.open(request)
            row.top = top_logits_needed([self.drafter])
            row.reads_prompt = reads_prompts([self.drafter])
            row.hidden = needs_hidden([self.drafter])
            policy = parts.budget if label == Walk.label else for_one_text(parts.budget)
            row.budget = policy.open(self._cost)
            row.context.adviser = getattr(row.budget, "adviser", None)
        return row


def _distribution_of(request: Transform | None, drafter: Drafter | None) -> Transform | None:
    """Return the transform of a call: the requested one, or the one that the drafter requires."""
    transform: Transform | None = required_transform(drafter)
    if transform is not None and request is not None and transform is not request:
        raise InputError(
            f"got transform={request.name!r} with a drafter that changes the distribution itself "
            f"({transform.name!r}); expected one of them."
        )
    return transform if request is None else request
