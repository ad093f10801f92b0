"""The figures of `ragspec bench long`: by kind, length and way, paired with plain decoding."""

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
from harness.long_ways import PEER, PLAIN, Result
from ragspec.pipelines.bench.measure import interval, is_timed
from ragspec.pipelines.bench.results import NO_VALUE
from ragspec.reports.report import loop_share

WORST = 0.25  # the share of prompts that are as slow as the worst quarter's bound, or slower
SURE = 1.96  # standard deviations of a 95 % interval


@dataclass(frozen=True, slots=True)
class Requests:
    """One task over one document, in all ways. length: what was to be read; tokens: what was."""

    document: str
    length: int
    tokens: int
    task: Task
    result: dict[str, Result]

    def tells(self, direction: str) -> bool:
        """Tell whether the plain text, and another one that a way wrote, can be timed."""
        plain, current = self.result[PLAIN], self.result[direction]
        return is_timed(plain.outcome.tokens) and (current.same or is_timed(current.outcome.tokens))

    def ratio(self, direction: str) -> float:
        """Return how many times as fast as plain decoding a way was, by the token."""
        return self.result[PLAIN].token_seconds / max(1e-9, self.result[direction].token_seconds)

    def equal(self, direction: str) -> bool:
        """Tell whether a way wrote the tokens of plain decoding; transformers may go on."""
        plain, current = (self.result[name].outcome.tokens for name in (PLAIN, direction))
        return (current[: len(plain)] if direction == PEER else current) == plain

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON types."""
        facts = {"document": self.document, "length": self.length, "tokens": self.tokens}
        task = {"kind": self.task.kind, "task": self.task.id, "question": self.task.question}
        return facts | task | {"ways": {name: self._variant(name) for name in self.result}}

    def _variant(self, name: str) -> dict[str, Any]:
        result = self.result[name]
        gold = self.task.gold
        return {
            "tokens": len(result.outcome.tokens),
            "forwards": result.outcome.forwards,
            "seconds": result.seconds,
            "prefill": result.outcome.prefill,
            "ratio": self.ratio(name),
            "equal": self.equal(name),
            "gold": holds(result.text, gold) if gold else None,
            "by_source": result.by_source,
            "text": result.text,
            "steps": [list(asdict(step).values()) for step in result.steps],
        }


@dataclass(frozen=True, slots=True)
class LongRow:
    """One way for the tasks of one kind over documents of one length.

    prompts: all; kept: those that tell speeds apart, over which are taken: ratio, the median of
    times as fast as plain decoding by the token, with its 95 % interval, and worst_quarter, which
    one prompt in four does not reach. ms: milliseconds a token. accepted: share of the drafted
    tokens. c: milliseconds of a level of a draft over those of a plain step. equal: share of texts
    with the tokens of plain decoding, None for another law or prompt. gold:
    share that holds a gold answer, with its 95 % interval (Wilson), None without gold answers.
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


def rows_of(request: Sequence[Requests]) -> list[LongRow]:
    """Return a row for each kind, length and way, in the order in which they were met."""
    groups: dict[tuple[str, int], list[Requests]] = {}
    for each in request:
        groups.setdefault((each.task.kind, each.length), []).append(each)
    return [
        _row(kind, length, direction, group)
        for (kind, length), group in groups.items()
        for direction in group[0].result
    ]


def _row(kind: str, length: int, direction: str, group: Sequence[Requests]) -> LongRow:
    results = [each.result[direction] for each in group]
    ratios = [each.ratio(direction) for each in group if each.tells(direction)]
    low, high = interval(ratios)
    steps = [step for each in results for step in each.steps]
    drafted, selected = (sum(getattr(step, n) for step in steps) for n in ("nodes", "accepted"))
    levels = [
        each.result[direction].level_ms / (1000.0 * each.result[PLAIN].token_seconds)  # type: ignore[operator]
        for each in group
        if each.result[direction].level_ms is not None
    ]
    answered = [each for each in group if each.task.gold]
    right = [holds(each.result[direction].text, each.task.gold) for each in answered]
    gold, *bounds = _share(sum(right), len(right)) if right else (None, None, None)
    return LongRow(
        *(kind, length, direction, len(group), len(ratios)),
        ratio=_number(median(ratios) if ratios else math.nan),
        ratio_low=_number(low),
        ratio_high=_number(high),
        worst_quarter=float(np.quantile(ratios, WORST)) if ratios else None,
        ms=1000.0 * median(each.token_seconds for each in results),
        tokens_per_forward=_per_forward(results),
        accepted=selected / drafted if drafted else None,
        c=median(levels) if levels else None,
        equal=fmean(each.equal(direction) for each in group) if results[0].same else None,
        loops=fmean(loop_share(each.outcome.tokens) for each in results),
        gold=gold,
        gold_low=bounds[0],
        gold_high=bounds[1],
    )


def _per_forward(results: Sequence[Result]) -> float:
    """Return tokens by forwards of decoding, without the prompt's own and the token it gives."""
    tokens = sum(len(each.outcome.tokens) - 1 for each in results)
    forwards = sum(len(each.steps) or each.outcome.forwards - 1 for each in results)
    return tokens / max(1, forwards)


def _share(right: int, count: int) -> tuple[float, float, float]:
    """Return a share and its 95 % interval (Wilson 1927)."""
    share, square = right / count, SURE * SURE
    middle = (share + square / (2 * count)) / (1 + square / count)
    room = math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    half = SURE * room / (1 + square / count)
    return share, max(0.0, middle - half), min(1.0, middle + half)


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


COLUMNS = (
    *("variant", ">prompts", ">to plain", ">95 %", ">worst quarter", ">ms a token"),
    *(">tokens a forward", ">accepted", ">c", ">equal", ">gold"),
)


def cells(row: LongRow) -> list[str]:
    """Return a row for people."""
    whole = row.ratio is not None
    return [
        *(row.variant, f"{row.timed}/{row.prompts}"),
        f"{row.ratio:.2f}" if whole else NO_VALUE,
        f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if whole else NO_VALUE,
        f"{row.worst_quarter:.2f}" if whole else NO_VALUE,
        *(f"{row.ms:.0f}", f"{row.tokens_per_forward:.2f}"),
        *(
            _summary(row.accepted, "{:.0%}"),
            _summary(row.c, "{:.2f}"),
            _summary(row.equal, "{:.0%}"),
        ),
        *(_summary(row.gold, "{:.0%}"),),
    ]


def tables(rows: Sequence[LongRow]) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield a title and the cells of a table for each kind and length."""
    for kind, length in dict.fromkeys((row.kind, row.length) for row in rows):
        some = [row for row in rows if (row.kind, row.length) == (kind, length)]
        yield f"{kind}, {length:,} tokens", [cells(row) for row in some]


def _summary(value: float | None, how: str) -> str:
    return NO_VALUE if value is None else how.format(value)


def series(
    rows: Sequence[LongRow], figure: Callable[[LongRow], float | None]
) -> Iterator[tuple[str, list[Point]]]:
    """Yield each way with a figure by length, plain decoding and lengths without it left out."""
    for direction in dict.fromkeys(row.variant for row in rows if row.variant != PLAIN):
        points = [
            Point(row.length, value, row.timed)
            for row in rows
            if row.variant == direction and (value := figure(row)) is not None
        ]
        if points:
            yield direction, points
