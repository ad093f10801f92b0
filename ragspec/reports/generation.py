"""A finished text, the report of its steps, and the source of every token."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from ragspec.reports.report import Report, distinct_share, loop_share
from ragspec.rules.base import Step
from ragspec.sampling.settings import TokenLogprob
from ragspec.sampling.text_output import PlacedToken, TextOutput
from ragspec.trees.draft_tree import LAYOUT, PREDICTION
from ragspec.types import Tokenizer

STAGES = ("retrieve", "prefill", "draft", "verify", "commit", "host")
# Texts that are not documents count under their own name, whichever drafter copied from them.
COPIED: Mapping[int, str] = MappingProxyType({PREDICTION: "prediction", LAYOUT: "layout"})


@dataclass(slots=True)
class Generation:
    """One finished text.

    Attributes:
        text: Without stop strings and special tokens; "" without a tokenizer.
        tokens: All emitted ids, an end token included.
        finish_reason: "stop", "length", "paused" (see `Options`), "cancelled", or "refused" if a
            pipeline did not call the model.
        label: The guarantee of the output: exact, exact-for(distribution), bounded(tv<=x) or
            approximate.
    """

    text: str
    tokens: list[int]
    finish_reason: str
    label: str
    report: Report
    prompt_tokens: list[int]
    logprobs: list[TokenLogprob] | None = None
    steps: list[Step] = field(default_factory=list)
    sample: int = 0

    def cancelled(self) -> Self:
        """Return the text as one that was interrupted."""
        report = replace(self.report, finish_reason="cancelled")
        return replace(self, report=report, finish_reason="cancelled")


def place_tokens(tokenizer: Tokenizer, generation: Generation) -> list[PlacedToken]:
    """Return the tokens of a text that have log-probabilities, see `TextOutput.place`."""
    output = TextOutput(tokenizer, generation.prompt_tokens, placed=True)
    scored = generation.logprobs or []
    output.push([each.token for each in scored])
    return output.place(scored, generation.text, generation.finish_reason)


def sources_of(step: Step) -> list[str]:
    """Return the source of every node [N]: its drafter, or the name of its text in COPIED."""
    tree = step.tree
    pairs = zip(tree.source.tolist(), tree.origin[:, 0].tolist(), strict=True)
    return [COPIED.get(document, tree.sources[source]) for source, document in pairs]


def accepted_of(step: Step) -> tuple[int, ...]:
    """Return the accepted nodes that stand in the output; a stop may cut the path."""
    return step.path[: len(step.tokens)]


def count_sources(steps: Sequence[Step]) -> tuple[Counter[str], Counter[str]]:
    """Return the number of drafted tokens by source, and of those that stand in the output."""
    drafted, accepted = Counter[str](), Counter[str]()
    for step in steps:
        names = sources_of(step)
        drafted.update(names)
        accepted.update(names[node] for node in accepted_of(step))
    return drafted, accepted


def report_of(
    steps: Sequence[Step],
    tokens: Sequence[int],
    seconds: float,
    finish_reason: str,
    *,
    prefill: tuple[float, int] | None = None,
    reason: str | None = None,
    label: str = "exact",
    **facts: Any,
) -> Report:
    """Return the report of a text.

    Args:
        steps: All steps. One with the stage "prefill" is a token that the prompt's forwards gave.
        tokens: The text, without tokens of earlier calls.
        seconds: Wall time of prefill and decoding together.
        prefill: Milliseconds and forward passes over the prompt; by default those of the steps.
        reason: Why a policy did not draft, if it says so.
        **facts: Other fields of `Report`, which steps do not have.
    """
    times = [step.milliseconds["prefill"] for step in steps if "prefill" in step.milliseconds]
    prefill_ms, prefill_forwards = prefill or (sum(times), len(times))
    steps = [step for step in steps if "prefill" not in step.milliseconds]
    milliseconds = dict.fromkeys(STAGES, 0.0) | {"prefill": prefill_ms}
    for step in steps:
        for stage, value in step.milliseconds.items():
            milliseconds[stage] = milliseconds.get(stage, 0.0) + value
    drafted_by, accepted_by = count_sources(steps)
    drafted = tuple(len(step.tree) for step in steps)
    accepted = tuple(len(accepted_of(step)) for step in steps)
    excess = [each for step in steps for each in step.excess]
    measured = bool(excess) or label.startswith("exact")
    vain = f"no drafted token of {sum(drafted)} was accepted"
    reason = reason or (vain if any(drafted) else "nothing was drafted, so this was plain decoding")
    return Report(
        **dict[str, Any](prompt_tokens=0, seed=None) | facts,
        tokens=len(tokens),
        forwards=len(steps),
        prefill_forwards=prefill_forwards,
        steps=len(steps),
        per_step_drafted=drafted,
        per_step_accepted=accepted,
        drafted_by_source=dict(drafted_by.most_common()),
        accepted_by_source=dict(accepted_by.most_common()),
        milliseconds=milliseconds,
        seconds=seconds,
        decode_seconds=max(0.0, seconds - prefill_ms / 1000),
        label=label,
        finish_reason=finish_reason,
        distinct_4=distinct_share(tokens, 4),
        loop_share=loop_share(tokens),
        budget_sizes=dict(Counter(drafted)),
        reason=None if any(accepted) else reason,
        accepted_prediction_tokens=accepted_by["prediction"],
        rejected_prediction_tokens=drafted_by["prediction"] - accepted_by["prediction"],
        tv_excess=sum(excess) / max(1, len(tokens)) if measured else None,
        prefill_tokens=len(tokens) - sum(len(step.tokens) for step in steps),
    )
