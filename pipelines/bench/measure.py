"""Measure variants in one batch: paired, interleaved runs and medians of their ratios.

Variants alternate item by item, so that a machine whose speed drifts treats them alike. They are
compared by the median of per-item ratios with a bootstrap interval. Seconds are decode seconds: the
whole run less a run stopped at its first token. Texts whose plain output loops, or ends before it
can be timed, are counted but left out of the ratios: a loop is too easy to draft, and the
difference of two equal times is noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from ragspec.pipelines.bench.variants import Outcome, Variant
from ragspec.reports.report import distinct_share, loop_share

LOOPING = 0.3  # largest share of loops of a text that is timed
SHORTEST = 6  # tokens of the shortest text that is timed
TUNING_ITEMS = 4
RESAMPLES = 2000
PLAIN = ("plain", "hf-greedy")


class BenchTask(Protocol):
    """What every variant runs: a prompt or a picture."""

    @property
    def id(self) -> str:
        """The item's name, unique in its category."""

    @property
    def category(self) -> str:
        """The group that one row summarises."""

    @property
    def new_tokens(self) -> int:
        """How many tokens are generated at most."""


AnyItem = TypeVar("AnyItem", bound=BenchTask)


@dataclass(slots=True)
class Measurement:
    """All runs of one item in one variant: the outcome, and seconds of every repetition."""

    outcome: Outcome
    seconds: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)

    @property
    def decode_seconds(self) -> float:
        """Median of the whole runs less median of the runs stopped at the first token."""
        return max(1e-9, median(self.seconds) - median(self.prefill))


Runs = Sequence[Mapping[str, Measurement]]


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One category in one variant.

    items: all items; timed: those whose ratios count. tokens, forwards, seconds (decode),
    prefill_seconds: sums over all items. ratio: median over timed items of baseline decode seconds
    by this variant's; ratio_low, ratio_high: its 95 % bootstrap interval; ratio_end_to_end: the
    same with prefill. equal_to_plain: share of items with the tokens of plain decoding (ours, else
    transformers' greedy). figures: means of further numbers. NaN where nothing was measured.
    """

    category: str
    variant: str
    setting: str
    label: str
    items: int
    timed: int
    tokens: int
    forwards: int
    seconds: float
    prefill_seconds: float
    tokens_per_forward: float
    ratio: float
    ratio_low: float
    ratio_high: float
    ratio_end_to_end: float
    ratio_to_plain: float
    loop_share: float
    distinct_4: float
    equal_to_plain: float
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; NaN becomes None."""
        row = asdict(self)
        row |= row.pop("figures")
        return {name: None if value != value else value for name, value in row.items()}


@dataclass(slots=True)
class Benchmark(Generic[AnyItem]):
    """The measurements of a run, by (category, id) of the item and by variant."""

    items: list[AnyItem]
    measurements: dict[tuple[str, str], dict[str, Measurement]]
    settings: dict[tuple[str, str], str]
    skip_loops: bool = True

    def rows(self, baseline: str = "hf-greedy") -> list[BenchRow]:
        """Return one row for each category and variant."""
        rows = []
        for category, items in by_category(self.items).items():
            runs = [self.measurements[(item.category, item.id)] for item in items]
            timed = [run for run in runs if not self.skip_loops or is_timed(_plain_tokens(run))]
            for variant in runs[0]:
                setting = self.settings.get((category, variant), variant)
                rows.append(summarise(category, variant, setting, runs, timed, baseline))
        return rows


def is_timed(tokens: Sequence[int]) -> bool:
    """Return whether a plain text is long enough to be timed and does not loop."""
    return len(tokens) >= SHORTEST and loop_share(tokens) <= LOOPING


def run_benchmark(
    items: Sequence[AnyItem],
    variants: Mapping[str, Sequence[Variant]],
    *,
    repeats: int = 1,
    skip_loops: bool = True,
    on_progress: Callable[[str], None] = lambda line: None,
) -> Benchmark[AnyItem]:
    """Run every item in every variant, interleaved.

    Args:
        items: Prompts or pictures.
        variants: For each name the settings to try; the fastest over the first items is kept.
        repeats: Runs of each item in each variant.
        skip_loops: Leave looping and very short texts out of the ratios.
        on_progress: Called with a line for each item.
    """
    measurements: dict[tuple[str, str], dict[str, Measurement]] = {}
    settings: dict[tuple[str, str], str] = {}
    for category, group in by_category(items).items():
        chosen = {name: _tune(options, group) for name, options in variants.items()}
        settings.update({(category, name): variant.name for name, variant in chosen.items()})
        for variant in chosen.values():  # warm up
            variant.run(group[0], min(16, group[0].new_tokens))
        for number, item in enumerate(group):
            on_progress(f"{category} {number + 1}/{len(group)}")
            measurements[(item.category, item.id)] = _measure(item, chosen, repeats, number)
    return Benchmark(list(items), measurements, settings, skip_loops)


def summarise(
    category: str, variant: str, setting: str, runs: Runs, timed: Runs, baseline: str
) -> BenchRow:
    """Return the row of one variant from the runs of a category's items."""
    mine = [run[variant] for run in runs]
    plain = next((name for name in PLAIN if name in runs[0]), None)
    base = baseline if baseline in runs[0] else next(iter(runs[0]))
    ratios = [run[base].decode_seconds / run[variant].decode_seconds for run in timed]
    whole = [_median(run[base].seconds) / _median(run[variant].seconds) for run in timed]
    to_plain = [run[plain].decode_seconds / run[variant].decode_seconds for run in timed if plain]
    low, high = interval(ratios)
    tokens = sum(len(run.outcome.tokens) for run in mine)
    forwards = sum(run.outcome.forwards for run in mine)
    equal = [run[variant].outcome.tokens == run[plain].outcome.tokens for run in runs if plain]
    names = mine[0].outcome.figures if mine else {}
    return BenchRow(
        category=category,
        variant=variant,
        setting=setting,
        label=mine[0].outcome.label if mine else "",
        items=len(runs),
        timed=len(timed),
        tokens=tokens,
        forwards=forwards,
        seconds=sum(run.decode_seconds for run in mine),
        prefill_seconds=sum(_median(run.prefill) for run in mine),
        tokens_per_forward=tokens / max(1, forwards),
        ratio=_median(ratios),
        ratio_low=low,
        ratio_high=high,
        ratio_end_to_end=_median(whole),
        ratio_to_plain=_median(to_plain),
        loop_share=_mean([loop_share(run.outcome.tokens) for run in mine]),
        distinct_4=_mean([distinct_share(run.outcome.tokens, 4) for run in mine]),
        equal_to_plain=_mean(equal),
        figures={name: _mean([run.outcome.figures[name] for run in mine]) for name in names},
    )


def interval(ratios: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the median, from a fixed seed; NaNs without ratios."""
    if not ratios:
        return math.nan, math.nan
    rng = np.random.default_rng(0)
    draws = rng.choice(np.asarray(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def by_category(items: Sequence[AnyItem]) -> dict[str, list[AnyItem]]:
    """Return the items grouped, categories in the order in which they first appear."""
    groups: dict[str, list[AnyItem]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    return groups


def _measure(
    item: BenchTask, variants: Mapping[str, Variant], repeats: int, turn: int
) -> dict[str, Measurement]:
    """Run one item in all variants; every turn starts with another one."""
    names = list(variants)
    runs: dict[str, Measurement] = {}
    for repeat in range(repeats):
        shift = (turn + repeat) % len(names)
        for name in names[shift:] + names[:shift]:
            whole = variants[name].run(item, item.new_tokens)
            prefill = whole.prefill
            if prefill is None:
                prefill = variants[name].run(item, 1).seconds
            run = runs.setdefault(name, Measurement(whole))
            run.seconds.append(whole.seconds)
            run.prefill.append(prefill)
    return {name: runs[name] for name in names}


def _tune(options: Sequence[Variant], items: Sequence[BenchTask]) -> Variant:
    """Return the setting that is fastest over the first items of a category."""
    if len(options) == 1:
        return options[0]
    seconds = dict.fromkeys(range(len(options)), 0.0)
    for item in items[:TUNING_ITEMS]:
        for number, variant in enumerate(options):
            seconds[number] += variant.run(item, item.new_tokens).seconds
    return options[min(seconds, key=lambda number: seconds[number])]


def _plain_tokens(run: Mapping[str, Measurement]) -> list[int]:
    return (run.get("plain") or next(iter(run.values()))).outcome.tokens


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else math.nan


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
