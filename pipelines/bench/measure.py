"""Measure variants in one batch: paired, interleaved runs and medians of their ratios.

Variants alternate item by item, so that a machine whose speed drifts treats them alike. They are
compared by the median of per-item ratios with a bootstrap interval. Seconds are decode seconds: the
whole run less a run stopped at its first token. Texts whose plain output loops, or ends before it
can be timed, are counted but left out of the ratios: a loop is too easy to draft, and the
difference of two equal times is noise.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean, median

from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.console.records import split_drafters
from ragspec.pipelines.console.terminal import Terminal
from ragspec.storage.filesystem import write_output

LOOPING = 0.3  # largest share of loops of a text that is timed
SHORTEST = 6  # tokens of the shortest text that is timed
RESAMPLES = 2000
GREEDY, LOOKUP, ASSISTANT = PEERS = ("hf-greedy", "hf-lookup", "hf-assistant")  # transformers'
PLAIN = ("plain", GREEDY)
DEFAULT_VARIANTS = (*PEERS, "plain", "context", "model", "fused")
NO_VALUE = "-"


def peer_of(name: str) -> str:
    """Return the mode of transformers that a name stands for, or ''."""
    kind, at, tokens = name.partition("@")
    drafts = kind in (LOOKUP, ASSISTANT) and tokens.isdecimal() and int(tokens) > 0
    return kind if kind in PEERS and (not at or drafts) else ""


def parts_of(name: str) -> list[str]:
    """Return the drafters that a variant fuses, none in transformers."""
    return [] if peer_of(name) else split_drafters(name)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one item.

    Attributes:
        tokens: Generated tokens, or a number for each code or latent of a picture.
        forwards: Forward passes of the target, prefill included.
        seconds: Wall time.
        prefill: Seconds spent on the prompt; None if a run of one token has to measure it.
        figures: Further numbers of the run by name.
    """

    tokens: list[int]
    forwards: int
    seconds: float
    prefill: float | None = None
    label: str = ""
    figures: dict[str, float] = field(default_factory=dict)


# A configuration to measure: returns the outcome of an item with at most so many new tokens.
Variant = Callable[[BenchItem, int], Outcome]
Repeats = Sequence[Outcome]  # all runs of one item in one variant
Runs = Sequence[Mapping[str, Repeats]]


def decode_seconds(repeats: Repeats) -> float:
    """Return the median of the whole runs less that of the runs stopped at the first token."""
    return max(1e-9, median(each.seconds for each in repeats) - prefill_seconds(repeats))


def prefill_seconds(repeats: Repeats) -> float:
    """Return the median of the seconds spent on the prompt."""
    return median(each.prefill or 0.0 for each in repeats)


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One category in one variant. NaN stands for figures that were not measured.

    Attributes:
        items, timed: All items, and those whose ratios count.
        tokens, forwards, seconds, prefill_seconds: Sums over all items, `seconds` of decoding.
        ratio: Median over timed items of decode seconds, the baseline's by this variant's.
        ratio_low, ratio_high: 95 % bootstrap interval of `ratio`.
        ratio_end_to_end: As `ratio`, with prefill.
        ratio_to_plain: As `ratio`, against plain decoding (ours, else transformers' greedy).
        equal_to_plain: Share of items with the tokens of plain decoding.
        figures: Means of further numbers.
    """

    category: str
    variant: str
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
    equal_to_plain: float
    figures: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, object]:
        """Return the row as JSON types; NaN becomes None."""
        row = asdict(self)
        row |= row.pop("figures")
        return {name: None if value != value else value for name, value in row.items()}


def is_timed(tokens: Sequence[int]) -> bool:
    """Return whether a plain text is long enough to be timed and does not loop."""
    from ragspec.reports.report import loop_share

    return len(tokens) >= SHORTEST and loop_share(tokens) <= LOOPING


def choose_baseline(variants: Mapping[str, object]) -> str:
    """Return transformers' greedy decoding if it runs, else ours, else the first variant."""
    return next(name for name in (GREEDY, "plain", *variants) if name in variants)


def run_benchmark(
    items: Sequence[BenchItem],
    variants: Mapping[str, Variant],
    *,
    repeats: int = 1,
    skip_loops: bool = True,
    on_progress: Callable[[str], None] = lambda line: None,
) -> list[BenchRow]:
    """Run every item in every variant, interleaved, and summarise each category and variant.

    Args:
        variants: Variants by name. Ratios are against `choose_baseline`.
        skip_loops: Leave looping and very short texts out of the ratios.
    """
    baseline, rows = choose_baseline(variants), []
    plain = "plain" if "plain" in variants else next(iter(variants))
    for category, group in by_category(items).items():
        for name, variant in variants.items():
            on_progress(f"{category}: warming up {name}")
            variant(group[0], min(16, group[0].new_tokens))
        runs = []
        for number, item in enumerate(group):
            on_progress(f"{category} {number + 1}/{len(group)}")
            runs.append(_measure(item, variants, repeats, number))
        timed = [run for run in runs if not skip_loops or is_timed(run[plain][0].tokens)]
        rows += [summarise(category, name, runs, timed, baseline) for name in variants]
    return rows


def summarise(category: str, variant: str, runs: Runs, timed: Runs, baseline: str) -> BenchRow:
    """Return the row of one variant from the runs of a category's items."""
    from ragspec.reports.report import loop_share

    mine = [run[variant] for run in runs]
    plain = next((name for name in PLAIN if name in runs[0]), None)
    firsts = [repeats[0] for repeats in mine]

    def against(other: str | None, seconds: Callable[[Repeats], float]) -> list[float]:
        return [seconds(run[other]) / seconds(run[variant]) for run in timed if other]

    ratios = against(baseline, decode_seconds)
    whole = against(baseline, lambda repeats: median(each.seconds for each in repeats))
    to_plain = against(plain, decode_seconds)
    low, high = interval(ratios)
    tokens = sum(len(first.tokens) for first in firsts)
    forwards = sum(first.forwards for first in firsts)
    equal = [run[variant][0].tokens == run[plain][0].tokens for run in runs if plain]
    return BenchRow(
        category=category,
        variant=variant,
        label=firsts[0].label,
        items=len(runs),
        timed=len(timed),
        tokens=tokens,
        forwards=forwards,
        seconds=sum(map(decode_seconds, mine)),
        prefill_seconds=sum(map(prefill_seconds, mine)),
        tokens_per_forward=tokens / max(1, forwards),
        ratio=median(ratios or [math.nan]),
        ratio_low=low,
        ratio_high=high,
        ratio_end_to_end=median(whole or [math.nan]),
        ratio_to_plain=median(to_plain or [math.nan]),
        loop_share=fmean(loop_share(first.tokens) for first in firsts),
        equal_to_plain=fmean(equal or [math.nan]),
        figures={name: fmean(each.figures[name] for each in firsts) for name in firsts[0].figures},
    )


def interval(ratios: Sequence[float], level: float = 0.95) -> tuple[float, float]:
    """Return the bootstrap interval of the median, from a fixed seed; NaNs without ratios."""
    import numpy as np

    if not ratios:
        return math.nan, math.nan
    draws = np.random.default_rng(0).choice(np.asarray(ratios), size=(RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def by_category(items: Sequence[BenchItem]) -> dict[str, list[BenchItem]]:
    """Return the items grouped, categories in the order in which they first appear."""
    groups: dict[str, list[BenchItem]] = {}
    for item in items:
        groups.setdefault(item.category, []).append(item)
    return groups


def _measure(
    item: BenchItem, variants: Mapping[str, Variant], repeats: int, turn: int
) -> dict[str, list[Outcome]]:
    """Run one item in all variants; every turn starts with another one."""
    names = list(variants)
    runs: dict[str, list[Outcome]] = {name: [] for name in names}
    for repeat in range(repeats):
        shift = (turn + repeat) % len(names)
        for name in names[shift:] + names[:shift]:
            whole = variants[name](item, item.new_tokens)
            if whole.prefill is None:
                whole = replace(whole, prefill=variants[name](item, 1).seconds)
            runs[name].append(whole)
    return runs


def cells(row: BenchRow) -> dict[str, str]:
    """Return a row for people, by column."""
    return {
        "category": row.category,
        "variant": row.variant,
        "items": f"{row.timed}/{row.items}",
        "tokens/forward": f"{row.tokens_per_forward:.2f}",
        "ratio": _number(row.ratio),
        "95 %": f"{row.ratio_low:.2f}-{row.ratio_high:.2f}" if row.timed else NO_VALUE,
        "end to end": _number(row.ratio_end_to_end),
        "to plain": _number(row.ratio_to_plain),
        "loops": f"{row.loop_share:.2f}",
        "equal": NO_VALUE if math.isnan(row.equal_to_plain) else f"{row.equal_to_plain:.0%}",
        "label": row.label or NO_VALUE,
        **{name: _number(value, 4) for name, value in row.figures.items()},
    }


def show_results(
    rows: Sequence[BenchRow], baseline: str, facts: dict[str, object], path: Path | None = None
) -> None:
    """Print the table, and write the JSON file if one is named."""
    title = f"decode seconds against {baseline}, medians of paired ratios"
    table = [cells(row) for row in rows]
    Terminal().table(title, list(table[0]), [list(each.values()) for each in table])
    facts = {"date": datetime.now(UTC).date().isoformat(), "baseline": baseline} | facts
    if path is not None:
        document = {**facts, "rows": [row.to_dict() for row in rows]}
        write_output(path, "the rows", json.dumps(document, indent=1) + "\n")


def _number(value: float, digits: int = 2) -> str:
    return NO_VALUE if math.isnan(value) else f"{value:.{digits}f}"
