"""`ragspec bench text`: the same prompts in several ways of decoding, side by side in one run.

Ways are interleaved prompt by prompt, so that a machine whose speed drifts treats them alike, and
compared by the median of per-prompt paired ratios with a bootstrap interval. Seconds are decode
seconds: the whole run less a run that is stopped at its first token. Prompts whose plain output
loops, or ends before it can be timed, are counted but left out of the ratios: a loop is too easy to
draft, and the difference of two equal times is noise.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any
from uuid import uuid4

from ragspec.pipelines.bench.modes import Mode
from ragspec.pipelines.bench.prompts import BenchItem, by_category
from ragspec.pipelines.bench.records import Measured
from ragspec.pipelines.bench.table import Row, summarise
from ragspec.reports.report import loop_share

LOOPING = 0.3


SHORTEST = 6


TUNING_ITEMS = 4


@dataclass(slots=True)
class Benchmark:
    """The results of a run: what was measured, by (category, id) of the item and by mode."""

    items: list[BenchItem]
    measured: dict[tuple[str, str], dict[str, Measured]]
    settings: dict[tuple[str, str], str]

    def tells(self, item: BenchItem) -> bool:
        """Whether the plain output of the item can tell speeds apart: long enough, and no loop."""
        runs = self.measured[(item.category, item.id)]
        return telling((runs.get("plain") or next(iter(runs.values()))).outcome.tokens)

    def rows(self, baseline: str = "hf-greedy") -> list[Row]:
        """Return one row for each category and mode."""
        rows = []
        for category, items in by_category(self.items).items():
            runs = [self.measured[(item.category, item.id)] for item in items]
            kept = [run for run, item in zip(runs, items, strict=True) if self.tells(item)]
            for mode in runs[0]:
                setting = self.settings.get((category, mode), mode)
                rows.append(summarise(category, mode, setting, runs, kept, baseline))
        return rows


def telling(tokens: Sequence[int]) -> bool:
    """Tell whether a plain text is long enough for its speed to be measured, and no loop."""
    return len(tokens) >= SHORTEST and loop_share(tokens) <= LOOPING


def run_benchmark(
    items: Sequence[BenchItem],
    modes: dict[str, list[Mode]],
    *,
    repeats: int = 1,
    progress: Callable[[str], None] = lambda line: None,
) -> Benchmark:
    """Run every item in every mode, interleaved; modes with several settings are tuned first.

    Tuning runs each setting on the first few items of a category and keeps the fastest for it.
    """
    measured: dict[tuple[str, str], dict[str, Measured]] = {}
    settings: dict[tuple[str, str], str] = {}
    for category, group in by_category(items).items():
        chosen = {name: _tuned(options, group) for name, options in modes.items()}
        settings.update({(category, name): mode.name for name, mode in chosen.items()})
        _warm_up(chosen, group[0])
        for number, item in enumerate(group):
            progress(f"{category} {number + 1}/{len(group)}")
            measured[(item.category, item.id)] = _measure(item, chosen, repeats, number)
    return Benchmark(list(items), measured, settings)


def write_json(path: Path, rows: Sequence[Row], facts: dict[str, Any]) -> None:
    """Write the rows, one for each category and mode, and what describes the run."""
    document = {**facts, "rows": [row.to_dict() for row in rows]}
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")


def write_spec_bench(path: Path, benchmark: Benchmark, mode: str, tokenizer: Any) -> None:
    """Write the answers of one mode in Spec-Bench's own format, one line a question.

    A question has one turn; accept_lengths has the tokens of every step.
    """
    lines = []
    for item in benchmark.items:
        found = benchmark.measured[(item.category, item.id)][mode]
        tokens, given = found.outcome.tokens, found.outcome.step_tokens
        choice = {
            "index": 0,
            "turns": [tokenizer.decode(tokens, skip_special_tokens=True)],
            "decoding_steps": [len(given)],
            "new_tokens": [len(tokens)],
            "wall_time": [median(found.seconds)],
            "accept_lengths": given,
        }
        row = {  # as they stood in the file: the number, and Spec-Bench's own name
            "question_id": item.extra.get("question_id", item.id),
            "category": item.extra.get("category", item.category),
            "answer_id": uuid4().hex,
            "model_id": mode,
            "choices": [choice],
            "tstamp": time.time(),
        }
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _measure(
    item: BenchItem, modes: dict[str, Mode], repeats: int, turn: int
) -> dict[str, Measured]:
    """Run one item in all modes, beginning with another mode at each turn."""
    names = list(modes)
    found: dict[str, Measured] = {}
    for repeat in range(repeats):
        shift = (turn + repeat) % len(names)
        for name in names[shift:] + names[:shift]:
            whole = modes[name].run(item, item.new_tokens)
            prefill = whole.prefill
            if prefill is None:
                prefill = modes[name].run(item, 1).seconds
            kept = found.setdefault(name, Measured(whole))
            kept.seconds.append(whole.seconds)
            kept.prefill.append(prefill)
    return {name: found[name] for name in names}


def _tuned(options: Sequence[Mode], items: Sequence[BenchItem]) -> Mode:
    """Return the setting that is fastest over the first items of a category."""
    if len(options) == 1:
        return options[0]
    sample = items[:TUNING_ITEMS]
    spent = dict.fromkeys(range(len(options)), 0.0)
    for item in sample:
        for number, mode in enumerate(options):
            spent[number] += mode.run(item, item.new_tokens).seconds
    return options[min(spent, key=lambda number: spent[number])]


def _warm_up(modes: dict[str, Mode], item: BenchItem) -> None:
    for mode in modes.values():
        mode.run(item, min(16, item.new_tokens))
