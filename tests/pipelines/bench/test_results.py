"""Rows of a benchmark: ratios over items that do not loop, intervals, JSON."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ragspec.pipelines.bench.measure import Measurement, Row, interval, summarise
from ragspec.pipelines.bench.results import make_table
from ragspec.pipelines.bench.variants import Outcome


def measured(
    tokens: list[int], forwards: int, seconds: list[float], prefill: list[float]
) -> Measurement:
    return Measurement(Outcome(tokens, forwards, seconds[0]), seconds, prefill)


def runs() -> list[dict[str, Measurement]]:
    """Return three items: twice as fast, three times as fast with other tokens, and a loop."""
    free, other, loop = list(range(40)), list(range(100, 140)), [7] * 40
    return [
        {
            "hf-greedy": measured(free, 40, [5.0], [1.0]),
            "plain": measured(free, 40, [4.0], [1.0]),
            "context": measured(free, 20, [3.0], [1.0]),
        },
        {
            "hf-greedy": measured(free, 40, [6.5], [0.5]),
            "plain": measured(free, 40, [6.5], [0.5]),
            "context": measured(other, 10, [2.5], [0.5]),
        },
        {
            "hf-greedy": measured(loop, 40, [101.0], [1.0]),
            "plain": measured(loop, 40, [101.0], [1.0]),
            "context": measured(loop, 2, [2.0], [1.0]),
        },
    ]


def row(variant: str = "context", timed: int = 2) -> Row:
    return summarise("docqa", variant, f"{variant}:5", runs(), runs()[:timed], "hf-greedy")


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


def test_without_the_baseline_plain_takes_its_place() -> None:
    left = [{name: run[name] for name in ("plain", "context")} for run in runs()]
    result = summarise("docqa", "context", "context", left, left[:2], "hf-greedy")
    assert result.ratio == result.ratio_to_plain == pytest.approx((1.5 + 3.0) / 2)


def test_the_fields_of_a_row_are_valid_json_even_where_every_item_loops() -> None:
    fields = {"category", "variant", "items", "tokens", "forwards", "seconds", "prefill_seconds"}
    for timed in (2, 0):
        written = json.dumps(row(timed=timed).to_dict(), allow_nan=False)
        assert fields | {"loop_share", "equal_to_plain"} <= json.loads(written).keys()
    assert math.isnan(row(timed=0).ratio)
    assert row(timed=0).to_dict()["ratio"] is None
    assert row().to_dict()["ratio"] == pytest.approx(2.5)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=30))
def test_the_interval_holds_the_median_and_is_repeatable(ratios: list[float]) -> None:
    low, high = interval(ratios)
    assert min(ratios) <= low <= high <= max(ratios)
    assert (low, high) == interval(ratios)
    assert low <= float(np.median(ratios)) <= high or len(ratios) < 6


def test_the_interval_narrows_with_the_level_and_with_more_items() -> None:
    ratios = np.random.default_rng(1).normal(2.0, 0.5, 400).tolist()
    wide, narrow = interval(ratios[:20]), interval(ratios)
    assert narrow[1] - narrow[0] < (wide[1] - wide[0]) / 2
    low, high = interval(ratios[:20], 0.5)
    assert wide[0] <= low <= high <= wide[1]
    assert narrow[0] < 2.0 < narrow[1]
    assert all(math.isnan(end) for end in interval([]))


def test_the_table_shows_how_many_items_count() -> None:
    console = Console(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(make_table([row(), row(timed=0)], "hf-greedy"))
    text = console.export_text()
    assert "2/3" in text
    assert "0/3" in text
    assert "2.50" in text
    assert "context:5" in text
