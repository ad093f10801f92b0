"""Counts of one sequence while it is decoded, and the source of every token.

`ReportBuilder` only counts during decoding; `build` derives the report once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ragspec.reports.report import Report, distinct_share, label_of, loop_share
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import LAYOUT, PREDICTION

STAGES = ("retrieve", "prefill", "draft", "verify", "commit", "host")
# Texts that are not documents count under their own name, whichever drafter copied from them.
COPIED: Mapping[int, str] = MappingProxyType({PREDICTION: "prediction", LAYOUT: "layout"})


def sources_of(step: Step) -> list[str]:
    """Return the source of every node [N]: its drafter, or the name of its text in COPIED."""
    tree = step.tree
    return [
        COPIED.get(document, tree.sources[source])
        for source, document in zip(tree.source.tolist(), tree.origin[:, 0].tolist(), strict=True)
    ]


def accepted_of(step: Step) -> tuple[int, ...]:
    """Return the accepted nodes that stand in the output; a stop may cut the path."""
    return step.path[: len(step.tokens)]


def count_sources(steps: Sequence[Step]) -> tuple[Counter[str], Counter[str]]:
    """Return the number of drafted tokens by source, and of those that stand in the output."""
    drafted: Counter[str] = Counter()
    accepted: Counter[str] = Counter()
    for step in steps:
        names = sources_of(step) if len(step.tree) else []
        drafted.update(names)
        accepted.update(names[node] for node in accepted_of(step))
    return drafted, accepted


class ReportBuilder:
    """Counts the steps of one row of text; it holds no step, which may carry rows of logits.

    Args:
        label: The rule's label.
        rounded: Whether forwards of the target round visibly, see `rounds`.
    """

    def __init__(
        self, label: str, seed: int | None, prompt_tokens: int, rounded: bool = False
    ) -> None:
        self.label = label
        self.rounded = rounded
        self.seed = seed
        self.prompt_tokens = prompt_tokens
        self.cached = 0  # prompt tokens whose keys and values were cached before
        self._prefill_ms = 0.0
        self._prefill_forwards = 0
        self._extra_forwards = 0
        self._emitted = 0
        self._drafted: list[int] = []
        self._accepted: list[int] = []
        self._drafted_by: Counter[str] = Counter()
        self._accepted_by: Counter[str] = Counter()
        self._milliseconds = dict.fromkeys(STAGES, 0.0)
        self._excess: list[float] = []

    def prefill(self, milliseconds: float, forwards: int = 1) -> None:
        """Add the forward passes over the prompt, or over a part of it."""
        self._prefill_ms += milliseconds
        self._prefill_forwards += forwards

    def step(self, step: Step, forwards: int = 1) -> None:
        """Add one step; `forwards` is above 1 if it took several forward passes."""
        self._extra_forwards += forwards - 1
        self._excess.extend(step.excess)
        self._emitted += len(step.tokens)
        self._drafted.append(len(step.tree))
        self._accepted.append(len(accepted_of(step)))
        if len(step.tree):
            drafted, accepted = count_sources([step])
            self._drafted_by.update(drafted)
            self._accepted_by.update(accepted)
        for stage, value in step.milliseconds.items():
            self._milliseconds[stage] = self._milliseconds.get(stage, 0.0) + value

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
        prefill_ms = self._milliseconds["prefill"] + self._prefill_ms
        measured = bool(self._excess) or self.label.startswith("exact")
        predicted = self._accepted_by["prediction"]
        return Report(
            tokens=len(output_tokens),
            prompt_tokens=self.prompt_tokens,
            forwards=len(self._drafted) + self._extra_forwards,
            prefill_forwards=self._prefill_forwards,
            steps=len(self._drafted),
            per_step_drafted=tuple(self._drafted),
            per_step_accepted=tuple(self._accepted),
            drafted_by_source=dict(self._drafted_by.most_common()),
            accepted_by_source=dict(self._accepted_by.most_common()),
            milliseconds=self._milliseconds | {"prefill": prefill_ms},
            seconds=seconds,
            decode_seconds=max(0.0, seconds - self._prefill_ms / 1000),
            label=label_of(self.label, self.rounded),
            seed=self.seed,
            finish_reason=finish_reason,
            distinct_4=distinct_share(output_tokens, 4),
            loop_share=loop_share(output_tokens),
            budget=budget,
            budget_sizes=dict(Counter(self._drafted)),
            faults=dict(faults or {}),
            reason=self._no_gain(reason),
            rested=dict(rested or {}),
            accepted_prediction_tokens=predicted,
            rejected_prediction_tokens=self._drafted_by["prediction"] - predicted,
            tv_excess=sum(self._excess) / max(1, len(output_tokens)) if measured else None,
            prefill_tokens=len(output_tokens) - self._emitted,
            cached_tokens=self.cached,
            drift=drift,
            static=static,
        )

    def _no_gain(self, reason: str | None) -> str | None:
        """Return why speculation did not help; a policy's reason must agree with the counts."""
        if any(self._accepted):
            return None
        drafted = sum(self._drafted)
        if drafted:
            return reason or f"none of the {drafted} drafted tokens was accepted"
        return reason or "nothing was drafted, so this was plain decoding"
