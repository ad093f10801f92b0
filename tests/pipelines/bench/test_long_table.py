"""Rows of the long bench: paired ratios, worst quarter, cost, acceptance, intervals of shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from ragspec.pipelines.bench.long_table import Asked, _share, cells, rows_of, series, tables
from ragspec.pipelines.bench.long_tasks import Task
from ragspec.pipelines.bench.long_ways import DraftStep, Found
from ragspec.pipelines.bench.modes import Outcome
from ragspec.pipelines.page.curves import Point

TOKENS = list(range(11))


def found(seconds: float, tokens: list[int] = TOKENS, steps: tuple[DraftStep, ...] = ()) -> Found:
    outcome = Outcome(tokens, 11, seconds + 1.0, [1, 6, 4])
    return Found(outcome, "the text", seconds, steps)


def asked(number: int, auto: float, length: int = 100, ways: Mapping[str, Found] = {}) -> Asked:
    task = Task(f"{number}", "questions", "?", gold=("text",) if number else ("other",))
    steps = (DraftStep(4, 2, 1, 20.0, 90.0), DraftStep(0, 0, 0, 1.0, 90.0))
    both = {"plain": found(1.0), "auto": found(auto, steps=steps), **ways}
    return Asked("d", length, length + 9, task, both)


def test_a_row_has_the_median_and_the_worst_quarter() -> None:
    plain, auto = rows_of(
        [asked(n, seconds) for n, seconds in enumerate((0.5, 0.8, 1.0, 2.0, 4.0))]
    )
    assert plain.ratio == plain.worst_quarter == 1.0
    assert auto.ratio == pytest.approx(1.0) and auto.worst_quarter == pytest.approx(0.5)
    assert auto.accepted == 0.25 and auto.tokens_per_forward == 5.0
    assert auto.c == pytest.approx(0.1)  # 20 ms for two levels, 100 for a plain step
    assert auto.gold == 0.8 and auto.equal == 1.0 and auto.ms == pytest.approx(100.0)


def test_loops_and_short_texts_are_counted_but_not_timed() -> None:
    slow = asked(1, 4.0)
    loops = Asked("d", 100, 109, slow.task, {name: found(1.0, [7] * 20) for name in slow.found})
    short = Asked("d", 100, 109, slow.task, {name: found(1.0, [1, 2]) for name in slow.found})
    row = rows_of([slow, loops, short])[1]
    assert (row.prompts, row.kept) == (3, 1) and row.ratio == pytest.approx(0.25)
    none = rows_of([loops])[1]
    assert none.ratio is none.ratio_low is none.worst_quarter is None
    assert cells(none)[1:4] == ["0/1", "-", "-"]


def test_transformers_may_go_on_behind_a_text_and_we_may_not() -> None:
    longer = found(1.0, [*TOKENS, 99])
    each = asked(1, 1.0, ways={"hf-greedy": longer, "context": longer})
    assert each.equal("hf-greedy") and not each.equal("context")
    assert each.ratio("hf-greedy") == pytest.approx(1.1)  # by the token


def test_another_text_is_timed_where_it_can_be_and_never_called_equal() -> None:
    for tokens, kept in (([1], 0), (TOKENS[1:], 1)):
        each = replace(found(0.01, tokens), same=False)
        row = rows_of([asked(1, 1.0, ways={"retrieval": each})])[-1]
        assert row.way == "retrieval" and row.kept == kept
        assert row.equal is None and row.gold == 1.0


def test_tables_and_series_go_by_kind_and_length() -> None:
    rows = rows_of([asked(1, 0.5), asked(1, 0.25, length=200)])
    assert [title for title, _ in tables(rows)] == [
        "questions, 100 tokens",
        "questions, 200 tokens",
    ]
    assert list(series(rows, lambda row: row.ratio)) == [
        ("auto", [Point(100, 2.0, 1), Point(200, 4.0, 1)])
    ]


def test_the_interval_of_a_share_is_wilsons() -> None:
    assert _share(10, 40) == pytest.approx((0.25, 0.1419, 0.4019), abs=1e-4)
    assert _share(0, 5)[:2] == (0.0, 0.0) and _share(5, 5)[2] == 1.0
