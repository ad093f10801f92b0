from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.draft import DraftTree, Step
from ragspec.pipelines.runview import Span, colours_of, first_number, run_view
from tests.test_page import EVIL, WORDS, sample_trace


def test_spans_carry_source_document_and_run(tmp_path: Path) -> None:
    view = run_view(sample_trace(tmp_path))
    shown = [(span.text.strip(), span.css) for span in view.spans]
    assert shown[0] == ("A", "own")
    # The origin jumps to another document inside the accepted run: one span for each.
    assert shown[1:4] == [("draft is", "s0"), ("checked", "s0"), (EVIL, "own")]
    assert "context · a.md, token 4–5" in view.spans[1].tip
    assert "step 1: 3 drafted tokens accepted" in view.spans[1].tip
    assert view.spans[2].tip.startswith(f"context · {EVIL}, token 9\n")
    assert [span.text.strip() for span in view.spans if span.css == "s1"] == ["by"]
    joined = "".join(span.lead + span.text for span in view.spans)
    assert joined == "".join(WORDS)


def test_chart_holds_every_token_of_every_step(tmp_path: Path) -> None:
    chart = run_view(sample_trace(tmp_path)).chart
    bottom = chart.height - chart.bottom
    unit = next(bar.height for bar in chart.bars if bar.css == "own")
    assert sum(bar.height for bar in chart.bars) == pytest.approx(9 * unit)
    assert all(bar.y >= 0 and bar.y + bar.height <= bottom + 0.01 for bar in chart.bars)
    assert chart.bars[-1].x + chart.bars[-1].width <= chart.width
    assert chart.mean == pytest.approx(bottom - 8 / 3 * unit, abs=0.1)
    assert "step 0" in chart.bars[0].tip


def test_shares_add_up_to_the_whole(tmp_path: Path) -> None:
    view = run_view(sample_trace(tmp_path))
    assert sum(row.percent for row in view.sources) == pytest.approx(100)
    assert sum(stage.percent for stage in view.stages) == pytest.approx(100)
    assert view.stages[-1].name == "other"
    assert [(row.name, row.amount) for row in view.documents] == [("a.md", 2), (EVIL, 1)]


def test_leading_space_gets_no_colour() -> None:
    assert Span.of(" \n a b ", "s0", "tip") == Span(" \n ", "a b ", "s0", "tip")
    assert Span.of("  ", "own", "") == Span("  ", "", "own", "")


def test_the_source_that_gave_most_has_the_first_colour() -> None:
    steps = [
        Step(DraftTree.chain([1, 2, 3], "few"), (0,), (1, 9)),
        Step(DraftTree.chain([1, 2, 3], "many"), (0, 1, 2), (1, 2, 3, 9)),
        Step(DraftTree.chain([1], "never"), (), (9,)),
    ]
    assert colours_of(steps) == {"many": "s0", "few": "s1"}
    assert first_number(steps) == 1
    assert first_number([Step(DraftTree.empty(), (), (9,), {"prefill": 1.0})]) == 0
