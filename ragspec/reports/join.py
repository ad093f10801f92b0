"""One report for a text that was written in several calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ragspec.reports.report import Report, distinct_share, loop_share

# Counts, and mappings of them, that add up over the calls.
ADDED = (
    ("tokens", "prefill_tokens", "kept_tokens", "forwards", "prefill_forwards", "steps"),
    ("accepted_prediction_tokens", "rejected_prediction_tokens", "decode_seconds"),
)
MERGED = ("drafted_by_source", "accepted_by_source", "milliseconds", "budget_sizes", "faults")


def joined(reports: Sequence[Report], tokens: Sequence[int], seconds: float) -> Report:
    """Return the report of a text from those of its parts, in their order, at least one.

    tokens: of the whole text. seconds: the wall time of all of it, what lay between included.
    """
    first, last = reports[0], reports[-1]
    added: dict[str, Any] = {
        name: sum(getattr(report, name) for report in reports) for group in ADDED for name in group
    }
    added |= {name: _merged(getattr(report, name) for report in reports) for name in MERGED}
    accepted = sum(sum(report.per_step_accepted) for report in reports)
    return replace(
        last,
        **added,
        prompt_tokens=first.prompt_tokens,
        per_step_drafted=tuple(n for report in reports for n in report.per_step_drafted),
        per_step_accepted=tuple(n for report in reports for n in report.per_step_accepted),
        seconds=seconds,
        distinct_4=distinct_share(tokens, 4),
        loop_share=loop_share(tokens),
        reason=None if accepted else last.reason,
        tv_excess=_mean(reports, tokens, "tv_excess"),
        drift=_mean(reports, tokens, "drift"),
    )


def _mean(reports: Sequence[Report], tokens: Sequence[int], name: str) -> float | None:
    """Return the mean by token of a figure, None where a part did not measure it."""
    figures = [getattr(report, name) for report in reports]
    if None in figures:
        return None
    total = sum(figure * r.tokens for figure, r in zip(figures, reports, strict=True))
    return float(total) / max(1, len(tokens))


def _merged(mappings: Iterable[Mapping[Any, Any]]) -> dict[Any, Any]:
    total: Counter[Any] = Counter()
    for mapping in mappings:
        total.update(mapping)  # adds
    return dict(total)
