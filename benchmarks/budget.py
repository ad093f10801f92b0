"""The adaptive budget against fixed budgets and plain decoding, by kind of prompt.

    OMP_NUM_THREADS=1 python benchmarks/budget.py [--model smollm2] [--groups chat,free]

All variants use the drafter `auto`. They decode each prompt in turn, in rotated order, and must
emit equal tokens. The prompt is read before and cached, so the figures are those of decoding. A
ratio is the time of plain decoding over that of a variant: of a whole group, as its user waits for
all of it, and in brackets the median of its prompts, which leaves out the few that gain most. The
last column is the mean of groups. The clock is the processor time of the process, as other work may
run on the machine; wall time is reported beside it.

The gate: `auto` has at least .98 of the best single number in the mean of groups, and at least 1.0
in every group, by whole groups and by medians alike.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from harness.tasks import edit_items, plain_ids

from ragspec.engine.engine import Engine
from ragspec.models.resolve import STARTER
from ragspec.pipelines.bench.prompts import DOCQA, BenchItem, bundled_items, free_items, turn_ids
from ragspec.sampling.settings import Sampling

FIXED = (4, 8, 16, 32)
PLAIN, AUTO = "plain", "auto"
SHARE_OF_BEST, SHARE_OF_PLAIN = 0.98, 1.0  # the gate
SUBJECTS = ("a lighthouse", "the winter", "an old map", "a small library", "the first train")
SUBJECTS += ("a clever fox", "the market", "a broken clock", "the harbour", "an empty house")
SUBJECTS += ("the orchard", "a long walk")
CHAT = "Explain in a few sentences why people like {}."
OPENING = "Nobody had expected {} to matter, but"


@dataclass(frozen=True, slots=True)
class Timing:
    """The seconds of one variant on one prompt."""

    group: str
    item: str
    variant: str
    cpu: float
    wall: float
    forwards: int
    nodes: int


def items_of(engine: Engine, groups: Sequence[str], count: int) -> list[BenchItem]:
    """Return at most `count` items of each group."""
    tokenizer: Any = engine.tokenizer
    texts = [
        (p.stem, p.read_text(encoding="utf-8")) for p in sorted((STARTER / "guide").glob("*.md"))
    ]
    pieces = [(f"{name}-{i}", text[i:]) for i in (0, 1500) for name, text in texts]
    continued = [replace(item, temperature=0.0) for item in free_items(tokenizer, pieces)]
    makers: dict[str, Callable[[], Sequence[BenchItem]]] = {
        "documents": lambda: [item for item in bundled_items(engine) if item.category == DOCQA],
        "continuation": lambda: continued,
        "copies": lambda: [*repeats(tokenizer, pieces), *edit_items(tokenizer, pieces, count)],
        "chat": lambda: [
            BenchItem(each, "", tuple(turn_ids(tokenizer, CHAT.format(each))), 0, temperature=0.8)
            for each in SUBJECTS
        ],
        "free": lambda: [
            BenchItem(
                each, "", tuple(plain_ids(tokenizer, OPENING.format(each))), 0, temperature=1.0
            )
            for each in SUBJECTS
        ],
    }
    items = []
    for group in groups or makers:
        prompts = makers[group]()
        step = max(1, len(prompts) // count)
        items += [replace(item, category=group) for item in prompts[::step][:count]]
    return items


def repeats(tokenizer: Any, pieces: Sequence[tuple[str, str]]) -> list[BenchItem]:
    """Return greedy items that repeat a text of which they hold the first words once more."""
    items = []
    for name, text in pieces:
        ids = tuple(plain_ids(tokenizer, text[:900]))
        items.append(BenchItem(name, "", (*ids, *plain_ids(tokenizer, "\n\n"), *ids[:16]), 0))
    return items


def measure(engines: dict[str, Engine], items: Sequence[BenchItem], tokens: int) -> list[Timing]:
    """Decode every item by every engine in rotated order, and check that the tokens agree."""
    timings = []
    for number, item in enumerate(items):
        engines[PLAIN].prefill(list(item.prompt))
        names, expected = list(engines), None
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            sampling = Sampling(temperature=item.temperature, seed=number)
            wall, cpu = time.perf_counter(), time.process_time()
            out = engines[name].generate(
                list(item.prompt),
                sampling,
                max_new_tokens=tokens,
                ignore_eos=True,
                spans=item.spans or None,
                texts=item.texts or None,
            )
            cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
            expected = expected or out.tokens
            if out.tokens != expected:
                raise SystemExit(f"{name} changed the text of {item.category} {item.id}")
            nodes = sum(len(step.tree) for step in out.steps)
            timings.append(
                Timing(item.category, item.id, name, cpu, wall, out.report.forward_passes, nodes)
            )
    return timings


def ratios(timings: Sequence[Timing], clock: str, whole: bool) -> dict[str, dict[str, float]]:
    """Return the ratio of each variant and group, and the mean of groups as the group "mean".

    Args:
        whole: Compare the time of all prompts of a group; else take the median of their ratios.
    """
    seconds: dict[str, dict[str, dict[str, float]]] = {}
    for t in timings:
        group = seconds.setdefault(t.variant, {}).setdefault(t.group, {})
        group[t.item] = getattr(t, clock)
    table: dict[str, dict[str, float]] = {}
    for variant, groups in seconds.items():
        row = table[variant] = {}
        for group, times in groups.items():
            plain = seconds[PLAIN][group]
            each = [plain[item] / times[item] for item in times]
            row[group] = sum(plain.values()) / sum(times.values()) if whole else median(each)
        row["mean"] = mean(row.values())
    return table


def gate(table: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return `auto` over the best number, in the mean of groups, and its least ratio to plain."""
    best = max(row["mean"] for name, row in table.items() if name.isdecimal())
    return {"of_best": table[AUTO]["mean"] / best, "of_plain": min(table[AUTO].values())}


def main() -> None:
    """Measure all variants, print the tables and the gate, and write the timings."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="starter")
    parser.add_argument("--groups", default="", help="names, comma-separated; default: all")
    parser.add_argument("--prompts", type=int, default=12, help="prompts of a group")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of a prompt")
    parser.add_argument("--budgets", default=",".join(map(str, FIXED)), help="numbers of nodes")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = Engine.from_pretrained(options.model, drafter=None, dtype="float32")
    engines = {PLAIN: base, AUTO: base.with_drafter("auto", "auto")}
    engines |= {each: base.with_drafter("auto", int(each)) for each in options.budgets.split(",")}
    items = items_of(base, [g for g in options.groups.split(",") if g], options.prompts)
    for engine in engines.values():  # compiles look-ups and kernels; not counted
        engine.generate(list(items[0].prompt), max_new_tokens=8)
    timings = measure(engines, items, options.tokens)
    for clock in ("cpu", "wall"):
        table, medians = ratios(timings, clock, True), ratios(timings, clock, False)
        groups = list(table[PLAIN])
        print(f"| {clock} | {' | '.join(groups)} |\n| --- {'| --- ' * len(groups)}|")
        for name, row in table.items():
            cells = [f"{row[group]:.2f} ({medians[name][group]:.2f})" for group in groups]
            print(f"| {name} | {' | '.join(cells)} |")
        for what, result in (("whole groups", gate(table)), ("medians", gate(medians))):
            passed = result["of_best"] >= SHARE_OF_BEST and result["of_plain"] >= SHARE_OF_PLAIN
            print(f"gate {'passed' if passed else 'missed'} by {what}: {result}")
    if options.json:
        keys = Timing.__dataclass_fields__
        rows = [{key: getattr(timing, key) for key in keys} for timing in timings]
        facts = {
            "model": options.model,
            "tokens": options.tokens,
            "gate": gate(ratios(timings, "cpu", True)),
            "gate_of_medians": gate(ratios(timings, "cpu", False)),
        }
        options.json.write_text(json.dumps(facts | {"rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
