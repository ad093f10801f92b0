"""What one generation cost and what came of its drafts.

`ReportBuilder` is fed by the one loop and only stores; everything is derived once, in `build`.
The acceptance figures carry vLLM's names and definitions (per-request acceptance metrics of its
speculative decoding): a step is one draft and one verification, the bonus token counts in the
mean length and nowhere else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from ragspec.acceptance.base import Step
from ragspec.errors import InputError
from ragspec.reports.label import label_of
from ragspec.reports.retrieval import Retrieval
from ragspec.reports.sources import kept_of, sources_of

STAGES = ("retrieve", "prefill", "draft", "verify", "commit", "host")
DERIVED = (
    "drafted",
    "accepted",
    "mean_accepted_length",
    "draft_acceptance_rate",
    "draft_cost",
    "acceptance_histogram",
    "forward_passes",
    "tokens_per_second",
    "tokens_per_forward",
)
LONGEST_LOOP = 32
LOOP_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of one generated sequence; counts are tokens, `milliseconds` wall clock.

    forwards: target forward passes of decoding; prefill_forwards those of the prompt, which give
    prefill_tokens of the tokens. kept_tokens: of the prompt, known from the call before.
    drafted, accepted: tokens proposed, and kept in the output. per_step_*: the same, each step.
    accepted_by_source, drafted_by_source: the same, by the name of the drafter. faults: times a
    drafter failed. accepted_prediction_tokens, rejected_prediction_tokens: tokens drafted from a
    predicted output that stand in the text, or do not (OpenAI's names). seconds: the whole run;
    decode_seconds: the run less retrieval and prefill.
    distinct_4: share of distinct 4-grams. loop_share: share of tokens inside a loop. budget: name
    of the policy; budget_sizes: tree size -> number of steps. reason: why speculation gave
    no token, None where it did. rested: by source, for how many steps it was not asked, or told of
    none, and why. tv_excess: mean total variation per token that a relaxed rule may
    have added; 0 under exact rules, None under rules that do not measure it. drift: mean total
    variation per token between the target's own law and the one that a transform made of it, None
    where nothing measures it. static: how steps of fixed shape were taken, "off" or "off: why"
    where they were not. kv_bytes: of keys and values at the end of a long document's answer,
    None for others. retrieval: the
    searches of a text that looks passages up while it is written, None for any other.
    """

    tokens: int
    prompt_tokens: int
    forwards: int
    prefill_forwards: int
    steps: int
    per_step_drafted: tuple[int, ...]
    per_step_accepted: tuple[int, ...]
    drafted_by_source: dict[str, int]
    accepted_by_source: dict[str, int]
    milliseconds: dict[str, float]
    seconds: float
    decode_seconds: float
    label: str
    seed: int | None
    finish_reason: str
    distinct_4: float
    loop_share: float
    budget: str = "none"
    budget_sizes: dict[int, int] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=dict)
    reason: str | None = None
    rested: dict[str, str] = field(default_factory=dict)
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    tv_excess: float | None = None
    prefill_tokens: int = 1
    kept_tokens: int = 0
    retrieval: Retrieval | None = None
    drift: float | None = None
    kv_bytes: int | None = None
    static: str = "off"

    @property
    def forward_passes(self) -> int:
        """All target forward passes, the prompt's included, which gives the first token."""
        return self.forwards + self.prefill_forwards

    @property
    def drafted(self) -> int:
        """Tokens that were proposed (vLLM: num_draft_tokens)."""
        return sum(self.per_step_drafted)

    @property
    def accepted(self) -> int:
        """Proposed tokens that stand in the output (vLLM: num_accepted_draft_tokens)."""
        return sum(self.per_step_accepted)

    @property
    def mean_accepted_length(self) -> float:
        """1 + accepted / steps, vLLM's mean_acceptance_length; 0 where there was no step."""
        return 1.0 + self.accepted / self.steps if self.steps else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """accepted / drafted; 0 where nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def draft_cost(self) -> float | None:
        """Time to propose a token by the time of a target's forward: c of the papers.

        None where nothing was proposed.
        """
        if not (self.drafted and self.forwards and self.milliseconds.get("verify")):
            return None
        proposed = self.milliseconds.get("draft", 0.0) / self.drafted
        return proposed * self.forwards / self.milliseconds["verify"]

    @property
    def acceptance_histogram(self) -> list[int]:
        """Number of steps by accepted tokens: entry k counts the steps that kept k."""
        counts: list[int] = np.bincount(np.asarray(self.per_step_accepted, np.int64)).tolist()
        return counts

    @property
    def tokens_per_second(self) -> float:
        """Tokens of decoding by its seconds, both without what the prompt took and gave."""
        decoded = max(self.tokens - self.prefill_tokens, 0)
        return decoded / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens by all target forward passes; 0 where there was none."""
        return self.tokens / self.forward_passes if self.forward_passes else 0.0

    def with_retrieval(self, milliseconds: float) -> Report:
        """Return this report with the time of the search that came before the generation."""
        stages = {**self.milliseconds, "retrieve": milliseconds}
        before = self.milliseconds.get("retrieve", 0.0)
        seconds = self.seconds + (milliseconds - before) / 1000
        return replace(self, milliseconds=stages, seconds=seconds)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON types; vLLM's schema stands under `speculative_decoding`."""
        facts: dict[str, Any] = {item.name: getattr(self, item.name) for item in fields(self)}
        for name in ("per_step_drafted", "per_step_accepted"):
            del facts[name]
        facts["budget_sizes"] = {str(size): n for size, n in sorted(self.budget_sizes.items())}
        facts["milliseconds"] = {k: round(v, 4) for k, v in self.milliseconds.items()}
        facts["retrieval"] = None if self.retrieval is None else self.retrieval.to_dict()
        facts |= {name: getattr(self, name) for name in DERIVED}
        facts["speculative_decoding"] = self._vllm()
        return facts

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Report:
        """Return the report that `to_dict` wrote.

        Raises InputError where a field is missing.
        """
        steps = data.get("speculative_decoding", {})
        known = {item.name: data[item.name] for item in fields(cls) if item.name in data}
        known["per_step_drafted"] = tuple(steps.get("per_step_drafted", ()))
        known["per_step_accepted"] = tuple(steps.get("per_step_accepted", ()))
        if data.get("retrieval") is not None:
            known["retrieval"] = Retrieval.from_dict(data["retrieval"])
        known["budget_sizes"] = {int(k): n for k, n in data.get("budget_sizes", {}).items()}
        try:
            return cls(**known)
        except TypeError as error:
            raise InputError(
                f"this is not a whole report ({error}); expected what Report.to_dict wrote. "
                "Write the trace again."
            ) from error

    def _vllm(self) -> dict[str, Any]:
        return {
            "mean_acceptance_length": self.mean_accepted_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            "acceptance_histogram": self.acceptance_histogram,
            "num_spec_steps": self.steps,
            "num_accepted_draft_tokens": self.accepted,
            "num_draft_tokens": self.drafted,
            "per_step_accepted": list(self.per_step_accepted),
            "per_step_drafted": list(self.per_step_drafted),
        }

    def summary(self) -> str:
        """Return one paragraph for people."""
        pace = f", {self.tokens_per_second:.0f} tokens/s while decoding" if self.steps else ""
        parts = [
            f"{_counted(self.tokens, 'token')} in {_counted(self.forward_passes, 'forward pass')} "
            f"({self.tokens_per_forward:.2f} a pass), {self.seconds:.2f} s{pace}, "
            f"label {self.label}."
        ]
        if self.drafted:
            by_source = ", ".join(f"{name} {n}" for name, n in self.accepted_by_source.items())
            parts.append(
                f"{self.accepted} of {self.drafted} drafted tokens accepted "
                f"({self.draft_acceptance_rate:.0%}): {by_source or 'none'}."
            )
        if self.retrieval is not None:
            parts.append(self.retrieval.summary())
        spent = ", ".join(f"{k} {v:.0f}" for k, v in self.milliseconds.items() if v >= 0.5)
        if spent:
            parts.append(f"Milliseconds: {spent}.")
        if self.tv_excess:
            parts.append(f"Relaxed by {self.tv_excess:.3f} total variation a token.")
        if self.drift:
            parts.append(f"The law drifts by {self.drift:.3f} total variation a token.")
        if self.loop_share > 0.2:
            parts.append(f"{self.loop_share:.0%} of the output repeats itself.")
        if self.faults:
            failed = ", ".join(f"{name} {n}" for name, n in self.faults.items())
            parts.append(f"Drafters that failed: {failed}.")
        if self.rested:
            left = "; ".join(f"{name} for {why}" for name, why in self.rested.items())
            parts.append(f"Left alone: {left}.")
        if self.reason:
            parts.append(f"No gain from speculation: {self.reason}.")
        return " ".join(parts)


@dataclass(frozen=True, slots=True)
class _Row:
    """What is kept of a step: not the step itself, which may hold rows of laws [N + 1, V]."""

    sources: tuple[str, ...]
    kept: tuple[int, ...]
    emitted: int
    milliseconds: dict[str, float]


class ReportBuilder:
    """Collects the facts of one row of text; the row's loop owns it."""

    def __init__(
        self, label: str, seed: int | None, prompt_tokens: int, rounded: bool = False
    ) -> None:
        """label: the rule's; rounded: whether the target's numbers round visibly (see `label`)."""
        self.label = label
        self.rounded = rounded
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.kept = 0  # tokens of it that were not read again
        self._prefill_ms = 0.0
        self._prefill_forwards = 0
        self._extra_forwards = 0
        self._rows: list[_Row] = []
        self._excess: list[float] = []

    def prefill(self, milliseconds: float, forwards: int = 1) -> None:
        """Add the forward passes over the prompt, or over a part of it."""
        self._prefill_ms += milliseconds
        self._prefill_forwards += forwards

    def step(self, step: Step, forwards: int = 1) -> None:
        """Add one step; `forwards` is above 1 where a model had to be run twice for it."""
        self._extra_forwards += forwards - 1
        self._excess.extend(step.excess)
        named = tuple(sources_of(step)) if len(step.tree) else ()
        self._rows.append(_Row(named, kept_of(step), len(step.tokens), step.milliseconds))

    def build(
        self,
        output_tokens: Sequence[int],
        seconds: float,
        finish_reason: str,
        *,
        budget: str = "none",
        faults: Mapping[str, int] | None = None,
        reason: str | None = None,
        rested: Mapping[str, str] | None = None,
        drift: float | None = None,
        static: str = "off",
    ) -> Report:
        """Return the report; `seconds` is the wall time of prefill and decoding together."""
        drafted = tuple(len(row.sources) for row in self._rows)
        accepted = tuple(len(row.kept) for row in self._rows)
        proposed = Counter(name for row in self._rows for name in row.sources)
        kept = Counter(row.sources[node] for row in self._rows for node in row.kept)
        measured = bool(self._excess) or self.label.startswith("exact")
        return Report(
            tokens=len(output_tokens),
            prompt_tokens=self.prompt_tokens,
            forwards=len(self._rows) + self._extra_forwards,
            prefill_forwards=self._prefill_forwards,
            steps=len(self._rows),
            per_step_drafted=drafted,
            per_step_accepted=accepted,
            drafted_by_source=dict(proposed.most_common()),
            accepted_by_source=dict(kept.most_common()),
            milliseconds=self._milliseconds(),
            seconds=seconds,
            decode_seconds=max(0.0, seconds - self._prefill_ms / 1000),
            label=label_of(self.label, self.rounded),
            seed=self.seed,
            finish_reason=finish_reason,
            distinct_4=distinct_share(output_tokens, 4),
            loop_share=loop_share(output_tokens),
            budget=budget,
            budget_sizes=dict(Counter(drafted)),
            faults=dict(faults or {}),
            reason=_why_not(sum(drafted), sum(accepted), reason),
            rested=dict(rested or {}),
            accepted_prediction_tokens=kept["prediction"],
            rejected_prediction_tokens=proposed["prediction"] - kept["prediction"],
            tv_excess=sum(self._excess) / max(1, len(output_tokens)) if measured else None,
            prefill_tokens=len(output_tokens) - sum(row.emitted for row in self._rows),
            kept_tokens=self.kept,
            drift=drift,
            static=static,
        )

    def _milliseconds(self) -> dict[str, float]:
        spent = dict.fromkeys(STAGES, 0.0)
        spent["prefill"] = self._prefill_ms
        for row in self._rows:
            for stage, value in row.milliseconds.items():
                spent[stage] = spent.get(stage, 0.0) + value
        return spent


def _why_not(drafted: int, accepted: int, told: str | None) -> str | None:
    """Return why speculation did not help; what a policy told of must agree with what was done."""
    if accepted:
        return None
    if drafted:
        return told or f"none of the {drafted} drafted tokens was accepted"
    return told or "nothing was drafted, so this was plain decoding"


def _counted(number: int, what: str) -> str:
    plural = "es" if what.endswith("s") else "s"
    return f"{number} {what}{plural if number != 1 else ''}"


def distinct_share(tokens: Sequence[int], n: int = 4) -> float:
    """Return the share of distinct n-grams among all n-grams; 1 for fewer than n tokens."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def loop_share(
    tokens: Sequence[int], longest: int = LONGEST_LOOP, repeats: int = LOOP_REPEATS
) -> float:
    """Return the share of tokens that lie inside a loop.

    A loop is a stretch in which a cycle of at most `longest` tokens stands at least `repeats`
    times in a row; the tokens of all its rounds count, a last unfinished round included.
    """
    ids = np.asarray(tokens, dtype=np.int64)
    inside = np.zeros(len(ids), dtype=np.bool_)
    for period in range(1, min(longest, len(ids) // repeats) + 1):
        same = np.concatenate(([False], ids[period:] == ids[:-period], [False]))
        edges = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2)
        for start, stop in edges[edges[:, 1] - edges[:, 0] >= period * (repeats - 1)].tolist():
            inside[start : stop + period] = True
    return float(inside.mean()) if len(ids) else 0.0
