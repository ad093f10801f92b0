"""The figures of `bench.py long`: by kind, length and variant, paired with plain decoding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median
from typing import Any

import numpy as np
from evaluation.line_charts import Point

from harness.data import holds
from harness.long_tasks import Task
from harness.long_variants import PEER, PLAIN, VariantAnswer
from ragspec.pipelines.bench.measure import NO_VALUE, interval, is_timed
from ragspec.reports.report import loop_share

WORST = 0.25  # quantile of the ratios that bounds the slowest quarter of the prompts
Z_95 = 1.96  # standard deviations of a 95 % interval


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The answers of all variants to one task over one document.

    Attributes:
        length: Tokens of the document to read, as planned.
        tokens: Tokens that were read.
        answers: By name of the variant.
    """

    document: str
    length: int
    tokens: int
    task: Task
    answers: dict[str, VariantAnswer]

    def can_time(self, name: str) -> bool:
        """Return whether the plain text and the variant's text are fit for a ratio of times."""
        plain, answer = self.answers[PLAIN], self.answers[name]
        return is_timed(plain.outcome.tokens) and (answer.same or is_timed(answer.outcome.tokens))

    def ratio(self, name: str) -> float:
        """Return the plain decode seconds of a token by those of a variant."""
        return self.answers[PLAIN].token_seconds / max(1e-9, self.answers[name].token_seconds)

    def equal(self, name: str) -> bool:
        """Return whether a variant generated the plain tokens; transformers may continue."""
        plain, tokens = (self.answers[each].outcome.tokens for each in (PLAIN, name))
        return (tokens[: len(plain)] if name == PEER else tokens) == plain

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        facts = {"document": self.document, "length": self.length, "tokens": self.tokens}
        task = {"kind": self.task.kind, "task": self.task.id, "question": self.task.question}
        return facts | task | {"variants": {name: self._variant(name) for name in self.answers}}

    def _variant(self, name: str) -> dict[str, Any]:
        answer = self.answers[name]
        gold = self.task.gold
        return {
            "tokens": len(answer.outcome.tokens),
            "forwards": answer.outcome.forwards,
            "seconds": answer.seconds,
            "prefill": answer.outcome.prefill,
            "ratio": self.ratio(name),
            "equal": self.equal(name),
            "gold": holds(answer.text, gold) if gold else None,
            "by_source": answer.by_source,
            "text": answer.text,
            "steps": [list(asdict(step).values()) for step in answer.steps],
        }


@dataclass(frozen=True, slots=True)
class LongRow:
    """One variant for the tasks of one kind over documents of one length.

    Attributes:
        prompts, timed: All prompts, and those whose ratios count.
        ratio, ratio_low, ratio_high: Median speedup of decoding a token over plain decoding, and
            its 95 % interval.
        worst_quarter: Speedup that one prompt in four does not reach.
        ms: Milliseconds a token.
        accepted: Share of the drafted tokens that were accepted.
        c: Time of a level of a draft by that of a plain step.
        equal: Share of texts with the plain tokens; None for another distribution or prompt.
        loops: Mean share of tokens in loops.
        gold, gold_low, gold_high: Share of texts with a gold answer and its 95 % interval (Wilson);
            None without gold answers.
    """

    kind: str
    length: int
    variant: str
    prompts: int
    timed: int
    ratio: float | None
    ratio_low: float | None
    ratio_high: float | None
    worst_quarter: float | None
    ms: float
    tokens_per_forward: float
    accepted: float | None
    c: float | None
    equal: float | None
    loops: float
    gold: float | None = None
    gold_low: float | None = None
    gold_high: float | None = None


def rows_of(records: Sequence[TaskRecord]) -> list[LongRow]:
    """Return a row for each kind, length and variant, in their order in the records."""
    groups: dict[tuple[str, int], list[TaskRecord]] = {}
    for each in records:
        groups.setdefault((each.task.kind, each.length), []).append(each)
    return [
        _row(kind, length, variant, group)
        for (kind, length), group in groups.items()
        for variant in group[0].answers
    ]


def _row(kind: str, length: int, variant: str, group: Sequence[TaskRecord]) -> LongRow:
    answers = [each.answers[variant] for each in group]
    ratios = [each.ratio(variant) for each in group if each.can_time(variant)]
    low, high = interval(ratios)
    steps = [step for each in answers for step in each.steps]
    drafted, accepted = (sum(getattr(step, n) for step in steps) for n in ("nodes", "accepted"))
    levels = [
        level_ms / (1000.0 * each.answers[PLAIN].token_seconds)
        for each in group
        if (level_ms := each.answers[variant].level_ms) is not None
    ]
    with_gold = [each for each in group if each.task.gold]
    right = [holds(each.answers[variant].text, each.task.gold) for each in with_gold]
    gold, *bounds = _share(sum(right), len(right)) if right else (None, None, None)
    return LongRow(
        *(kind, length, variant, len(group), len(ratios)),
        ratio=_number(median(ratios) if ratios else math.nan),
        ratio_low=_number(low),
        ratio_high=_number(high),
        worst_quarter=float(np.quantile(ratios, WORST)) if ratios else None,
        ms=1000.0 * median(each.token_seconds for each in answers),
        tokens_per_forward=_per_forward(answers),
        accepted=accepted / drafted if drafted else None,
        c=median(levels) if levels else None,
        equal=fmean(each.equal(variant) for each in group) if answers[0].same else None,
        loops=fmean(loop_share(each.outcome.tokens) for each in answers),
        gold=gold,
        gold_low=bounds[0],
        gold_high=bounds[1],
    )


def _per_forward(answers: Sequence[VariantAnswer]) -> float:
    """Return tokens by forwards of decoding, without the prefill and its token."""
    tokens = sum(len(each.outcome.tokens) - 1 for each in answers)
    forwards = sum(len(each.steps) or each.outcome.forwards - 1 for each in answers)
    return tokens / max(1, forwards)


def _share(right: int, count: int) -> tuple[float, float, float]:
    """Return a share and its 95 % interval (Wilson 1927)."""
    share, square = right / count, Z_95 * Z_95
    centre = (share + square / (2 * count)) / (1 + square / count)
    root = math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    half = Z_95 * root / (1 + square / count)
    return share, max(0.0, centre - half), min(1.0, centre + half)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


COLUMNS = (
    *("variant", ">prompts", ">speedup", ">95 %", ">worst quarter", ">ms a token"),
    *(">tokens a forward", ">accepted", ">c", ">equal", ">gold"),
)


def cells(row: LongRow) -> list[str]:
    """Return the formatted cells of a row, in the order of `COLUMNS`."""
    timed = row.ratio is not None
    return [
        *(row.variant, f"{row.timed}/{row.prompts}"),
        f"{row.ratio:.2f}" if timed else NO_VALUE,
        f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if timed else NO_VALUE,
        f"{row.worst_quarter:.2f}" if timed else NO_VALUE,
        *(f"{row.ms:.0f}", f"{row.tokens_per_forward:.2f}"),
        *(_format(row.accepted, "{:.0%}"), _format(row.c, "{:.2f}"), _format(row.equal, "{:.0%}")),
        *(_format(row.gold, "{:.0%}"),),
    ]


def tables(rows: Sequence[LongRow]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a title and the cells of a table for each kind and length."""
    for kind, length in dict.fromkeys((row.kind, row.length) for row in rows):
        some = [row for row in rows if (row.kind, row.length) == (kind, length)]
        yield f"{kind}, {length:,} tokens", [cells(row) for row in some]


def _format(value: float | None, template: str) -> str:
    return NO_VALUE if value is None else template.format(value)


def series(
    rows: Sequence[LongRow], figure: Callable[[LongRow], float | None]
) -> Iterator[tuple[str, list[Point]]]:
    """Yield the figure of each variant by length, without plain decoding and missing values."""
    for variant in dict.fromkeys(row.variant for row in rows if row.variant != PLAIN):
        points = [
            Point(row.length, value, row.timed)
            for row in rows
            if row.variant == variant and (value := figure(row)) is not None
        ]
        if points:
            yield variant, points
