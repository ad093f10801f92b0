"""Rows of a benchmark: medians of paired ratios, their intervals, and the table for people."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ragspec.reports.report import distinct_share, loop_share

if TYPE_CHECKING:
    from rich.table import Table

    from ragspec.pipelines.bench.records import Measured

RESAMPLES = 2000
PLAIN = ("plain", "hf-greedy")
NONE_KEPT = "-"  # every item loops: there is no ratio
Runs = Sequence[Mapping[str, "Measured"]]


@dataclass(frozen=True, slots=True)
class Row:
    """One category in one mode.

    items: prompts in all, kept: those that do not loop, over which ratios are taken. tokens,
    forwards, seconds (decode), prefill_seconds: sums over all items. ratio: median over the kept
    items of baseline decode seconds / this mode's; ratio_low, ratio_high: 95 % bootstrap interval
    of it; ratio_end_to_end: the same with prefill. equal_to_plain: share of items whose tokens
    are those of plain decoding (ours, else transformers' greedy; NaN where neither was run).
    """

    category: str
    mode: str
    setting: str
    items: int
    kept: int
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

    def to_dict(self) -> dict[str, Any]:
        """Return the row as JSON types; what is no number (NaN) becomes None."""
        return {name: None if value != value else value for name, value in asdict(self).items()}


def summarise(category: str, mode: str, setting: str, runs: Runs, kept: Runs, baseline: str) -> Row:
    """Return the row of one mode from the runs of a category's items."""
    mine = [run[mode] for run in runs]
    plain = next((name for name in PLAIN if name in runs[0]), None)
    base = baseline if baseline in runs[0] else next(iter(runs[0]))
    ratios = [run[base].decode_seconds / run[mode].decode_seconds for run in kept]
    whole = [_median(run[base].seconds) / _median(run[mode].seconds) for run in kept]
    to_plain = [run[plain].decode_seconds / run[mode].decode_seconds for run in kept if plain]
    low, high = interval(ratios)
    tokens = sum(len(run.outcome.tokens) for run in mine)
    forwards = sum(run.outcome.forwards for run in mine)
    equal = [run[mode].outcome.tokens == run[plain].outcome.tokens for run in runs if plain]
    return Row(
        category=category,
        mode=mode,
        setting=setting,
        items=len(runs),
        kept=len(kept),
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
    )


def interval(ratios: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the median, from a fixed seed; NaNs where none were kept."""
    if not ratios:
        return float("nan"), float("nan")
    rng = np.random.default_rng(0)
    draws = rng.choice(np.asarray(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def make_table(rows: Sequence[Row], baseline: str) -> Table:
    """Return the table that is printed."""
    from rich.table import Table

    table = Table(title=f"decode seconds against {baseline}, medians of per-prompt ratios")
    for name in ("category", "mode", "items", "tokens/forward", "ratio", "95 %"):
        table.add_column(name)
    for name in ("end to end", "to plain", "loops", "equal"):
        table.add_column(name)
    for row in rows:
        table.add_row(
            row.category,
            row.setting,
            f"{row.kept}/{row.items}",
            f"{row.tokens_per_forward:.2f}",
            _number(row.ratio),
            f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if row.kept else NONE_KEPT,
            _number(row.ratio_end_to_end),
            _number(row.ratio_to_plain),
            f"{row.loop_share:.2f}",
            _percent(row.equal_to_plain),
        )
    return table


def _number(value: float) -> str:
    return NONE_KEPT if math.isnan(value) else f"{value:.2f}"


def _percent(value: float) -> str:
    return "-" if value != value else f"{value:.0%}"


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else float("nan")


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else float("nan")
