"""A benchmark run: interleaving, looping items, the table and the JSON file."""

import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import DocumentError
from ragspec.pipelines.bench.measure import (
    BenchRow,
    Outcome,
    choose_baseline,
    interval,
    run_benchmark,
    show_results,
    summarise,
)
from ragspec.pipelines.bench.prompts import (
    FIXED_NEW_TOKENS,
    BenchItem,
    free_items,
    items_of,
    read_turns,
)
from tests.support import tiny

FREE, LOOP = list(range(1, 31)), [7] * 30
ITEMS = [BenchItem(str(i), "qa", (i + 1, 5), 30) for i in range(3)] + [
    BenchItem("0", "free", (9, 9), 30)
]


@dataclass
class FakeVariant:
    """Logs its calls; items whose prompt starts with 2 loop."""

    name: str
    log: list[tuple[str, str, str, int]]
    draft_cost: float = 1.0
    forwards: int = 30
    tokens: list[int] = field(default_factory=lambda: FREE)

    def __call__(self, item: BenchItem, new_tokens: int) -> Outcome:
        self.log.append((self.name, item.category, item.id, new_tokens))
        tokens = (LOOP if item.prompt[0] == 2 else self.tokens)[:new_tokens]
        return Outcome(tokens, self.forwards, 0.5 + self.draft_cost * new_tokens)


def benchmark(log: list[tuple[str, str, str, int]], repeats: int = 1) -> list[BenchRow]:
    variants = {
        "hf-greedy": FakeVariant("hf-greedy", log, 2.0),
        "plain": FakeVariant("plain", log, 1.0),
        "lookup": FakeVariant("lookup", log, 0.5, 10),
    }
    return run_benchmark(ITEMS, variants, repeats=repeats)


def test_variants_are_interleaved_and_each_item_starts_with_the_next() -> None:
    log: list[tuple[str, str, str, int]] = []
    benchmark(log, repeats=2)
    requests = [[e[0] for e in log if e[1:] == ("qa", str(i), 30)] for i in range(3)]
    turns = [order[-6:][:3] for order in requests]
    assert turns[0] == ["hf-greedy", "plain", "lookup"]
    assert turns[1] == ["plain", "lookup", "hf-greedy"]
    assert turns[2] == ["lookup", "hf-greedy", "plain"]
    assert len([entry for entry in log if entry[3] == 1]) == 2 * 3 * len(ITEMS)


def test_a_variant_that_reports_its_prefill_is_not_run_for_one_token() -> None:
    class Reporting(FakeVariant):
        def __call__(self, item: BenchItem, new_tokens: int) -> Outcome:
            return replace(super().__call__(item, new_tokens), prefill=0.25)

    log: list[tuple[str, str, str, int]] = []
    rows = run_benchmark(ITEMS, {"plain": Reporting("plain", log, 1.0)})
    assert all(entry[3] > 1 for entry in log[1:])  # the first one warms up
    assert [row.prefill_seconds for row in rows] == [0.75, 0.25]
    assert [(row.category, row.items, row.timed) for row in rows] == [("qa", 3, 2), ("free", 1, 1)]


def runs() -> list[dict[str, list[Outcome]]]:
    """Return three items: twice as fast, three times as fast with other tokens, and a loop."""
    free, other, loop = list(range(40)), list(range(100, 140)), [7] * 40
    items = [
        [(free, 40, 5.0, 1.0), (free, 40, 4.0, 1.0), (free, 20, 3.0, 1.0)],
        [(free, 40, 6.5, 0.5), (free, 40, 6.5, 0.5), (other, 10, 2.5, 0.5)],
        [(loop, 40, 101.0, 1.0), (loop, 40, 101.0, 1.0), (loop, 2, 2.0, 1.0)],
    ]
    names = ("hf-greedy", "plain", "context")
    return [{n: [Outcome(*run)] for n, run in zip(names, item, strict=True)} for item in items]


def row(variant: str = "context", timed: int = 2) -> BenchRow:
    return summarise("docqa", variant, runs(), runs()[:timed], "hf-greedy")


def test_sums_are_over_all_items_and_ratios_over_those_that_do_not_loop() -> None:
    result = row()
    assert (result.items, result.timed, result.tokens, result.forwards) == (3, 2, 120, 32)
    assert result.seconds == pytest.approx(2.0 + 2.0 + 1.0)
    assert result.prefill_seconds == pytest.approx(2.5)
    assert result.tokens_per_forward == pytest.approx(120 / 32)
    assert result.ratio == pytest.approx((2.0 + 3.0) / 2)
    assert 2.0 <= result.ratio_low <= result.ratio <= result.ratio_high <= 3.0
    assert result.ratio_end_to_end == pytest.approx((5 / 3 + 6.5 / 2.5) / 2)
    assert result.ratio_to_plain == pytest.approx((1.5 + 3.0) / 2)
    assert result.loop_share == pytest.approx(1 / 3)
    assert result.equal_to_plain == pytest.approx(2 / 3)
    assert row("plain").equal_to_plain == 1.0


def test_without_transformers_plain_decoding_is_the_baseline() -> None:
    fast, plain = FakeVariant("context", [], 0.25), FakeVariant("plain", [])
    rows = run_benchmark(ITEMS, {"context": fast, "plain": plain})
    assert [row.ratio for row in rows] == [row.ratio_to_plain for row in rows]
    assert rows[0].ratio == pytest.approx(4.0) and choose_baseline({"model": 1}) == "model"


def test_figures_that_were_not_measured_are_null() -> None:
    assert math.isnan(row(timed=0).ratio)
    assert json.loads(json.dumps(row(timed=0).to_dict(), allow_nan=False))["ratio"] is None
    assert row().to_dict()["ratio"] == pytest.approx(2.5)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_is_repeatable(ratios: list[float]) -> None:
    low, high = interval(ratios)
    assert min(ratios) <= low <= high <= max(ratios)
    assert (low, high) == interval(ratios)
    assert low <= float(np.median(ratios)) <= high or len(ratios) < 6


def test_the_table_shows_how_many_items_count(capsys: pytest.CaptureFixture[str]) -> None:
    show_results([row(), row(timed=0)], "hf-greedy", {})
    text = capsys.readouterr().out
    assert all(each in text for each in ("2/3", "0/3", "2.50", "context"))


OURS = {"id": "a1", "category": "qa", "prompt": "who is it?"}
SPEC_BENCH: dict[str, Any] = {"question_id": 81, "category": "writing", "reference": ["x"]}
SPEC_BENCH["turns"] = ["first turn", "second turn"]


def read(folder: Path, *rows: Any, room: int | None = None) -> list[BenchItem]:
    path = folder / "data.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return items_of(read_turns(path), tiny.tokenizer(), room)


def test_rows_of_both_forms(tmp_path: Path) -> None:
    first, second = read(tmp_path, OURS, "", SPEC_BENCH)
    assert (first.id, first.category) == ("a1", "qa")
    assert first.prompt == tuple(tiny.tokenizer()("who is it?")["input_ids"])
    assert (second.id, second.category) == ("81", "writing")
    assert second.prompt == tuple(tiny.tokenizer()("first turn")["input_ids"])
    assert first.fixed
    assert first.new_tokens == FIXED_NEW_TOKENS
    # U+2028 is not escaped in many data files, and does not end a line of JSON.
    row = json.dumps({**OURS, "prompt": "one\u2028two"}, ensure_ascii=False)
    assert len(read(tmp_path, row)) == 1


def test_long_prompts_are_cut_at_their_start(tmp_path: Path) -> None:
    (item,) = read(tmp_path, {**OURS, "prompt": "x" * 50 + "the end"}, room=FIXED_NEW_TOKENS + 7)
    assert item.prompt == tuple(tiny.tokenizer()("the end")["input_ids"])


@pytest.mark.parametrize(
    "bad",
    [
        *("{", "5", "[1]", "null", '"prompt"', {"id": 1, "prompt": "no category"}, OURS),
        {"id": 1, "category": "qa"},
        *({"id": 1, "category": "qa", "prompt": each} for each in ("", 5, None)),
        *({"id": 1, "category": "qa", "turns": each} for each in ([], "a text", [["nested"]])),
    ],
    ids=str,
)
def test_a_line_that_cannot_be_read_is_named(bad: Any, tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"data\.jsonl, line 2"):
        read(tmp_path, OURS, bad)


def test_free_text_goes_on_from_the_first_tokens() -> None:
    texts = [("long", "abc" * 40), ("short", "abc")]
    (item,) = free_items(tiny.tokenizer(), texts, length=10)
    assert item.id == "long"
    assert item.prompt == tuple(tiny.tokenizer()("abcabcabca")["input_ids"])
    assert item.fixed
