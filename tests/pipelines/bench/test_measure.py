"""A benchmark run: interleaving, tuning, items that loop, and what is written."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from ragspec.pipelines.bench.measure import (
    TUNING_ITEMS,
    Benchmark,
    Measurement,
    is_timed,
    run_benchmark,
)
from ragspec.pipelines.bench.prompts import BenchItem
from ragspec.pipelines.bench.results import write_json
from ragspec.pipelines.bench.variants import Outcome

FREE, LOOP = list(range(1, 31)), [7] * 30
ITEMS = [BenchItem(str(i), "qa", (i + 1, 5), 30) for i in range(3)] + [
    BenchItem("0", "free", (9, 9), 30)
]


@dataclass
class FakeVariant:
    """Writes down what was asked of it; items whose prompt starts with 2 loop."""

    name: str
    log: list[tuple[str, str, str, int]]
    draft_cost: float = 1.0
    forwards: int = 30
    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=lambda: FREE)

    def run(self, item: BenchItem, new_tokens: int) -> Outcome:
        self.log.append((self.name, item.category, item.id, new_tokens))
        tokens = (LOOP if item.prompt[0] == 2 else self.tokens)[:new_tokens]
        return Outcome(tokens, self.forwards, 0.5 + self.draft_cost * new_tokens, self.steps)


def benchmark(
    log: list[tuple[str, str, str, int]], repeats: int = 1, items: list[BenchItem] = ITEMS
) -> Benchmark[BenchItem]:
    variants = {
        "hf-greedy": [FakeVariant("hf-greedy", log, 2.0)],
        "plain": [FakeVariant("plain", log, 1.0)],
        "lookup": [FakeVariant(f"lookup:{n}", log, n / 10, 10, [1, 20, 9]) for n in (7, 5, 9)],
    }
    return run_benchmark(items, variants, repeats=repeats)


def test_decode_seconds_are_the_whole_less_the_first_token() -> None:
    runs = Measurement(Outcome(FREE, 3, 5.0), [5.0, 9.0, 6.0], [1.0, 2.0, 50.0])
    assert runs.decode_seconds == 4.0
    assert Measurement(Outcome(FREE, 3, 1.0), [1.0], [2.0]).decode_seconds > 0


def test_the_fastest_setting_is_preserved_for_each_category() -> None:
    log: list[tuple[str, str, str, int]] = []
    result = benchmark(log)
    assert result.settings[("qa", "lookup")] == result.settings[("free", "lookup")] == "lookup:5"
    tuned = [entry for entry in log if entry[0] == "lookup:9"]
    assert [entry[1] for entry in tuned] == ["qa"] * min(3, TUNING_ITEMS) + ["free"]


def test_modes_are_interleaved_and_take_turns_in_going_first() -> None:
    log: list[tuple[str, str, str, int]] = []
    benchmark(log, repeats=2)
    whole = [entry for entry in log if entry[0] not in ("lookup:7", "lookup:9")]
    requests = [[e[0] for e in whole if e[1:] == ("qa", str(i), 30)] for i in range(3)]
    turns = [order[-6:][:3] for order in requests]
    assert turns[0] == ["hf-greedy", "plain", "lookup:5"]
    assert turns[1] == ["plain", "lookup:5", "hf-greedy"]
    assert turns[2] == ["lookup:5", "hf-greedy", "plain"]
    firsts = [entry for entry in log if entry[3] == 1]
    assert len(firsts) == 2 * 3 * len(ITEMS)


def test_a_mode_that_tells_its_prefill_is_not_run_for_it() -> None:
    class Telling(FakeVariant):
        def run(self, item: BenchItem, new_tokens: int) -> Outcome:
            return replace(super().run(item, new_tokens), prefill=0.25)

    log: list[tuple[str, str, str, int]] = []
    variants = {"plain": [Telling("plain", log, 1.0)]}
    result = run_benchmark(ITEMS, variants)
    assert all(entry[3] > 1 for entry in log[1:])  # the first one warms up
    assert {tuple(run["plain"].prefill) for run in result.measurements.values()} == {(0.25,)}


def test_items_that_loop_are_counted_but_left_out_of_the_ratios() -> None:
    rows = {(row.category, row.variant): row for row in benchmark([]).rows()}
    assert len(rows) == 2 * 3
    result = rows[("qa", "lookup")]
    assert (result.items, result.timed) == (3, 2)
    assert result.loop_share == pytest.approx(1 / 3)
    assert result.ratio == pytest.approx(2.0 / 0.5)
    assert result.ratio_to_plain == pytest.approx(1.0 / 0.5)
    assert result.setting == "lookup:5"
    assert rows[("free", "plain")].items == 1
    assert rows[("qa", "plain")].equal_to_plain == 1.0


def test_other_tokens_than_plain_decoding_are_visible() -> None:
    log: list[tuple[str, str, str, int]] = []
    variants = {
        "plain": [FakeVariant("plain", log)],
        "bad": [FakeVariant("bad", log, tokens=FREE[::-1])],
    }
    rows = run_benchmark(ITEMS, variants).rows()
    shares = {(row.category, row.variant): row.equal_to_plain for row in rows}
    assert shares[("qa", "bad")] == pytest.approx(1 / 3)  # the loop alone is the same
    assert shares[("free", "bad")] == 0.0
    assert shares[("qa", "plain")] == 1.0


def test_items_with_the_same_letters_are_not_taken_for_each_other() -> None:
    items = [BenchItem("xb", "a", (1, 5), 30), BenchItem("x", "ba", (2, 5), 30)]
    result = benchmark([], items=items)
    runs = [result.measurements[(item.category, item.id)]["plain"] for item in items]
    assert [is_timed(run.outcome.tokens) for run in runs] == [True, False]


def test_progress_names_category_and_number() -> None:
    lines: list[str] = []
    variants = {"plain": [FakeVariant("plain", [])]}
    run_benchmark(ITEMS, variants, on_progress=lines.append)
    assert lines == ["qa 1/3", "qa 2/3", "qa 3/3", "free 1/1"]


def test_the_json_holds_one_row_for_each_category_and_mode(tmp_path: Path) -> None:
    rows = benchmark([]).rows()
    write_json(tmp_path / "out.json", rows, {"model": "m", "baseline": "hf-greedy"})

    def forbid(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    text = (tmp_path / "out.json").read_text(encoding="utf-8")
    document = json.loads(text, parse_constant=forbid)
    assert document["model"] == "m"
    assert [(r["category"], r["variant"]) for r in document["rows"]] == [
        (category, mode) for category in ("qa", "free") for mode in ("hf-greedy", "plain", "lookup")
    ]
    for row in document["rows"]:
        assert row["tokens"] == 30 * row["items"]
        assert row["seconds"] > row["prefill_seconds"] > 0
        assert row["forwards"] in (90, 30, 10)
        assert {"loop_share", "equal_to_plain"} <= row.keys()


def test_looping_everywhere_still_writes_json(tmp_path: Path) -> None:
    rows = benchmark([], items=[BenchItem("1", "qa", (2, 5), 30)]).rows()
    assert rows[0].timed == 0
    write_json(tmp_path / "out.json", rows, {})
    assert "NaN" not in (tmp_path / "out.json").read_text(encoding="utf-8")
