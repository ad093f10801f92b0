"""A finished text with its tokens, label and report."""

from __future__ import annotations

from dataclasses import dataclass, field

from ragspec.reports.report import Report
from ragspec.rules.base import Step
from ragspec.sampling.settings import TokenLogprob


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
