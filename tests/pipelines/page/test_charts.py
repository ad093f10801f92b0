from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from ragspec.pipelines.page.charts import (
    Chart,
    colours_of,
    first_number,
    search_chart,
    share_chart,
    step_chart,
)
from ragspec.reports.report import Event
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree
from tests.pipelines.page.test_page import sample_trace


def inside(chart: Chart) -> bool:
    """Whether no bar and no column leaves the chart, and no column overlaps the next."""
    fits = all(bar.y >= 0 and bar.y + bar.height <= chart.base + 0.05 for bar in chart.bars)
    ends = [column.x + column.width for column in chart.columns]
    ordered = all(
        end <= after.x + 0.05 for end, after in zip(ends, chart.columns[1:], strict=False)
    )
    return (
        fits
        and ordered
        and all(chart.left <= column.x for column in chart.columns)
        and (max(ends, default=0) <= chart.width)
    )


def test_steps_hold_every_token(tmp_path: Path) -> None:
    steps = sample_trace(tmp_path).steps
    chart = step_chart(steps, colours_of(steps))
    unit = next(bar.height for bar in chart.bars if bar.css == "own")
    assert sum(bar.height for bar in chart.bars) == pytest.approx(9 * unit, abs=0.02)
    assert inside(chart)
    assert chart.mean == pytest.approx(chart.base - 9 / 4 * unit, abs=0.1)
    assert [column.number for column in chart.columns] == [0, 1, 2, 3]
    assert chart.columns[0].tip == "step 0: 1 of target model; 0 drafted"
    assert chart.columns[1].tip == "step 1: 3 of context, 1 of target model; 4 drafted"


def mixed(steps: int) -> list[Step]:
    """Return steps of six tokens: four of the context, then of the model, one of the target."""
    half = steps // 2
    early = Step(DraftTree.chain([1, 2, 3, 4, 5], "context"), (0, 1, 2, 3, 4), (1, 2, 3, 4, 5, 6))
    late = Step(DraftTree.chain([1, 2], "model"), (0, 1), (1, 2, 3))
    return [early] * half + [late] * half


@pytest.mark.parametrize("steps", [2, 8, 30, 400])
def test_shares_follow_the_text(steps: int) -> None:
    instance = mixed(steps)
    colours = colours_of(instance)
    chart = share_chart(instance, colours)
    tokens = sum(len(step.tokens) for step in instance)
    assert len(chart.columns) == -(-tokens // chart.per_column) <= 48
    assert chart.per_column >= 4
    assert inside(chart)
    heights = {column.x: 0.0 for column in chart.columns}
    for bar in chart.bars:
        heights[bar.x] += bar.height
    assert all(h == pytest.approx(chart.base - 8, abs=0.05) for h in heights.values())
    first, last = chart.columns[0].x, chart.columns[-1].x
    assert colours["context"] in {bar.css for bar in chart.bars if bar.x == first}
    if steps > 2:
        assert colours["context"] not in {bar.css for bar in chart.bars if bar.x == last}
    for name, inputs in (("context", 5), ("model", 2)):
        area = sum(
            bar.height * column_tokens(chart, bar.x, tokens)
            for bar in chart.bars
            if bar.css == colours[name]
        )
        assert area / (chart.base - 8) == pytest.approx(inputs * steps / 2, rel=0.01)


def column_tokens(chart: Chart, x: float, tokens: int) -> int:
    begin = next(column.number for column in chart.columns if column.x == x)
    return min(chart.per_column, tokens - begin + 1)


def test_the_tip_of_a_share_names_tokens_and_sources() -> None:
    instance = mixed(2)
    tips = [column.tip for column in share_chart(instance, colours_of(instance)).columns]
    assert tips[0] == "tokens 1–4: 4 of context"
    assert tips[1] == "tokens 5–8: 1 of context, 2 of model, 1 of target model"
    assert tips[2] == "tokens 9–9: 1 of target model"


def test_no_steps_make_empty_charts() -> None:
    for chart in (step_chart([], {}), share_chart([], {})):
        assert not chart.bars and not chart.columns and inside(chart)


def test_steps_that_emitted_nothing_make_charts() -> None:
    instance = [Step(DraftTree.chain([1], "context"), (), ())]
    for chart in (step_chart(instance, colours_of(instance)), share_chart(instance, {})):
        assert not chart.bars and inside(chart)


def test_ticks_are_few_and_even() -> None:
    chart = step_chart(mixed(100), {"context": "s0", "model": "s3"})
    numbers = [int(tick.text) for tick in chart.ticks]
    assert 4 <= len(numbers) <= 12
    assert len({b - a for a, b in pairwise(numbers)}) == 1


def test_a_prefill_is_step_zero() -> None:
    assert first_number([Step(DraftTree.empty(), (), (9,), {"prefill": 1.0})]) == 0
    assert first_number([Step(DraftTree.empty(), (), (9,))]) == 1
    assert first_number([]) == 1


def test_what_was_written_and_searched_lies_in_two_lanes_along_the_time() -> None:
    events = [
        Event("search", 0.0, 50.0),
        Event("write", 50.0, 30.0),
        Event("guess", 80.0, 1.0),
        Event("write", 80.0, 20.0, accepted=False),
        Event("search", 100.0, 60.0, 2),
        Event("ahead", 100.0, 40.0),
    ]
    instance = search_chart(events)
    assert [bar.css for bar in instance.bars] == ["s2", "s0", "own", "s2", "s1"]
    written = {bar.y for bar in instance.bars if bar.css != "s2"}
    searched = {bar.y for bar in instance.bars if bar.css == "s2"}
    assert len(written) == len(searched) == 1 and max(written) < min(searched)
    ends = [bar.x + bar.width for bar in instance.bars]
    assert max(ends) <= instance.width and min(bar.x for bar in instance.bars) == instance.left
    assert instance.bars[3].width / instance.bars[0].width == pytest.approx(60 / 50, rel=0.01)
    assert instance.columns[3].tip == "search of 2 queries: 60 ms from 100 ms on"
    assert "taken back" in instance.columns[2].tip
