import re
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.pipelines.page.page import trace_page
from ragspec.pipelines.page.run_view import (
    COLOURS,
    RunView,
    colours_of,
    first_number,
    meaning_of,
    preferred,
    slots_of,
    step_chart,
)
from ragspec.reports.generation import report_of
from ragspec.reports.trace import Trace
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import LAYOUT, PREDICTION, DraftTree
from tests.pipelines.page.test_page import EVIL, WORDS, sample_trace


def test_the_chart_of_steps_counts_every_token(tmp_path: Path) -> None:
    chart = step_chart(sample_trace(tmp_path).steps, {"context": "s0", "<b>model</b>": "s3"})
    parts = [column.parts for column in chart.columns]
    assert parts == [[("own", 1)], [("s0", 3), ("own", 1)], [("s3", 2), ("own", 1)], [("own", 1)]]
    assert (chart.most, chart.mean) == (4, 9 / 4)
    assert [column.number for column in chart.columns] == [0, 1, 2, 3]
    assert chart.columns[0].tip == "step 0: 1 of target model; 0 drafted"
    assert chart.columns[1].tip == "step 1: 3 of context, 1 of target model; 4 drafted"


def test_a_step_without_tokens_has_an_empty_column() -> None:
    instance = [Step(DraftTree.chain([1], "context"), (), ())]
    chart = step_chart(instance, colours_of(instance))
    assert [column.parts for column in chart.columns] == [[]] and chart.most == 1
    assert first_number([Step(DraftTree.empty(), (), (9,), {"prefill": 1.0})]) == 0
    assert first_number([Step(DraftTree.empty(), (), (9,))]) == first_number([]) == 1


@pytest.mark.parametrize(("steps", "every"), [(0, 1), (12, 1), (13, 2), (100, 10), (130, 20)])
def test_at_most_twelve_columns_have_a_number(steps: int, every: int) -> None:
    assert step_chart([Step(DraftTree.empty(), (), (9,))] * steps, {}).every == every


LISTED = ("context", "model", "rest", "recycling", "suffix", "hierarchy", "rasd", "prediction")


def test_the_listed_methods_have_distinct_colours() -> None:
    assert len({preferred()[name] for name in LISTED}) == len(LISTED) == COLOURS


@pytest.mark.parametrize("others", [(), ("model",), LISTED[1:], ("answers", "statistics", "mine")])
def test_the_colour_of_a_source_does_not_depend_on_other_sources(others: tuple[str, ...]) -> None:
    assert slots_of(["context", *others])["context"] == slots_of(["context"])["context"] == 0


@given(st.lists(st.sampled_from([*preferred(), "mine", "yours", "é", ""]), unique=True, max_size=8))
def test_up_to_eight_sources_have_distinct_colours_in_any_order(names: list[str]) -> None:
    slots = slots_of(names)
    assert set(slots) == set(names)
    assert len(set(slots.values())) == len(names)
    assert slots == slots_of(names[::-1])


def test_sources_are_in_order_of_accepted_tokens() -> None:
    steps = [
        Step(DraftTree.chain([1, 2, 3], "few"), (0,), (1, 9)),
        Step(DraftTree.chain([1, 2, 3], "many"), (0, 1, 2), (1, 2, 3, 9)),
        Step(DraftTree.chain([1], "never"), (), (9,)),
    ]
    assert list(colours_of(steps)) == ["many", "few", "never"]
    assert all(a != b for a, b in combinations(colours_of(steps).values(), 2))


def test_spans_have_a_source_a_place_and_a_step(tmp_path: Path) -> None:
    view = RunView(sample_trace(tmp_path))
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
    assert "".join(span.text for span in view.spans) == "".join(WORDS)
    steps = [span.step for span in view.spans]
    assert steps == sorted(steps) and set(steps) == {0, 1, 2, 3}


def test_tokens_and_milliseconds_add_up_to_the_report(tmp_path: Path) -> None:
    view = RunView(sample_trace(tmp_path))
    assert sum(view.accepted[name] for name, _ in view.drafters) == view.trace.report.tokens
    assert sum(view.stages.values()) == pytest.approx(view.whole_ms)
    assert [*view.stages][-1] == "other"
    assert view.documents == [("a.md", 2), (EVIL, 1)]


def test_leading_space_gets_no_colour() -> None:
    steps = [Step(DraftTree.empty(), (), (token,)) for token in range(3)]
    report = report_of(steps, [0, 1, 2], 0.1, "stop")
    page = trace_page(Trace((*steps,), ((" x",), (" \n a b ",), ("  ",)), report))
    pieces = re.findall(r"(\s*)<span class=\"own\"[^>]*data-tip[^>]*>([^<]*)</span>", page)
    assert pieces == [("", "x"), (" \n ", "a b "), ("  ", "")]


@pytest.mark.parametrize(
    ("document", "name", "place"),
    [(PREDICTION, "prediction", " · token 4–5"), (LAYOUT, "layout", "")],
)
def test_text_of_prediction_or_layout_has_its_colour(document: int, name: str, place: str) -> None:
    origin = [(document, 4), (document, 5), (0, 7)]
    steps = (
        Step(DraftTree.chain([1, 2, 3], "context", origin=origin), (0, 1, 2), (1, 2, 3, 9)),
        Step(DraftTree.chain([5], "recycling"), (), (9,)),
    )
    report = report_of(steps, [1, 2, 3, 9, 9], 0.1, "stop")
    assert report.accepted_prediction_tokens == (2 if document == PREDICTION else 0)
    view = RunView(Trace(steps, (("a", "b", "c", "d"), ("e",)), report))
    assert [span.text for span in view.spans] == ["ab", "c", "d", "e"]
    assert view.spans[0].tip.startswith(f"{name}{place}\n")
    assert view.spans[1].tip.startswith("context · document 0, token 7\n")
    rows = [(each, view.accepted[each], view.drafted[each]) for each, _ in view.drafters[:3]]
    assert rows == [(name, 2, 2), ("context", 1, 1), ("recycling", 0, 1)]
    assert [inputs for inputs, _ in view.legend] == [name, "context", "target model"]
    assert [inputs for inputs, _ in view.drafters][2] == "recycling"


@pytest.mark.parametrize(
    ("label", "meaning"),
    [
        ("exact", "that plain decoding gives"),
        ("exact-for(distribution)", "another sample"),
        ("exact-for(distribution) up to rounding", "another sample"),
        ("exact-for(knn)", "plain decoding by the distribution 'knn' gives"),
        ("exact-for(knn) up to rounding", "a rounding apart"),
        ("bounded(tv<=0.5)", "within the stated distance"),
        ("approximate", "may differ"),
    ],
)
def test_every_label_is_explained(label: str, meaning: str) -> None:
    assert meaning in meaning_of(label)
