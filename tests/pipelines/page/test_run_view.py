from __future__ import annotations

from pathlib import Path

import pytest

from ragspec.pipelines.page.run_view import Span, meaning_of, run_view
from ragspec.reports.builder import ReportBuilder
from ragspec.reports.trace import Trace, TraceHeader
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import LAYOUT, PREDICTION, DraftTree
from tests.pipelines.page.test_page import EVIL, WORDS, sample_trace


def test_spans_carry_source_document_and_run(tmp_path: Path) -> None:
    view = run_view(sample_trace(tmp_path))
    text = [(span.text.strip(), span.css) for span in view.spans]
    assert text[0] == ("A", "own")
    # The origin jumps to another document inside the accepted run: one span for each.
    context = dict(view.legend)["context"]
    assert text[1:4] == [("draft is", context), ("checked", context), (EVIL, "own")]
    assert "context · a.md, token 4–5" in view.spans[1].tip
    assert "step 1: 3 drafted tokens accepted" in view.spans[1].tip
    assert view.spans[2].tip.startswith(f"context · {EVIL}, token 9\n")
    model = dict(view.legend)["<b>model</b>"]
    assert [span.text.strip() for span in view.spans if span.css == model] == ["by"]
    joined = "".join(span.lead + span.text for span in view.spans)
    assert joined == "".join(WORDS)


def test_a_piece_names_the_step_that_gave_it(tmp_path: Path) -> None:
    spans = run_view(sample_trace(tmp_path)).spans
    assert [span.step for span in spans] == sorted(span.step for span in spans)
    assert {span.step for span in spans} == {0, 1, 2, 3}


def test_shares_add_up_to_the_whole(tmp_path: Path) -> None:
    view = run_view(sample_trace(tmp_path))
    assert sum(row.percent for row in view.sources) == pytest.approx(100)
    assert sum(stage.percent for stage in view.stages) == pytest.approx(100)
    assert view.stages[-1].name == "other"
    assert [(row.name, row.amount) for row in view.documents] == [("a.md", 2), (EVIL, 1)]


def test_leading_space_gets_no_colour() -> None:
    assert Span.of(" \n a b ", "s0", "tip") == Span(" \n ", "a b ", "s0", "tip")
    assert Span.of("  ", "own", "") == Span("  ", "", "own", "")


@pytest.mark.parametrize(
    ("document", "name", "place"),
    [(PREDICTION, "prediction", " · token 4–5"), (LAYOUT, "layout", "")],
)
def test_what_was_copied_from_no_document_has_its_its_colour(
    document: int, name: str, place: str
) -> None:
    origin = [(document, 4), (document, 5), (0, 7)]
    steps = (
        Step(DraftTree.chain([1, 2, 3], "context", origin=origin), (0, 1, 2), (1, 2, 3, 9)),
        Step(DraftTree.chain([5], "recycling"), (), (9,)),
    )
    builder = ReportBuilder("exact", 0, 2)
    for step in steps:
        builder.step(step)
    report = builder.build([1, 2, 3, 9, 9], 0.1, "stop")
    assert report.accepted_prediction_tokens == (2 if document == PREDICTION else 0)
    view = run_view(Trace(TraceHeader(), steps, (("a", "b", "c", "d"), ("e",)), report, True))
    assert [span.text for span in view.spans] == ["ab", "c", "d", "e"]
    assert view.spans[0].tip.startswith(f"{name}{place}\n")
    assert view.spans[1].tip.startswith("context · document 0, token 7\n")
    assert [(row.name, row.amount, row.more[0]) for row in view.sources[:3]] == [
        (name, 2, "2"),
        ("context", 1, "1"),
        ("recycling", 0, "1"),
    ]
    assert [inputs for inputs, _ in view.legend] == [name, "context", "target model"]
    assert [inputs for inputs, _ in view.drafters][2] == "recycling"


@pytest.mark.parametrize(
    ("label", "said"),
    [
        ("exact", "that plain decoding gives"),
        ("exact-for(distribution)", "another sample from it"),
        ("exact-for(distribution) up to rounding", "another sample from it"),
        ("exact-for(knn)", "plain decoding by the distribution 'knn' gives"),
        ("exact-for(knn) up to rounding", "a rounding apart"),
        ("bounded(tv<=0.5)", "within the stated distance"),
        ("approximate", "may differ"),
    ],
)
def test_every_label_is_explained(label: str, said: str) -> None:
    assert said in meaning_of(label)
