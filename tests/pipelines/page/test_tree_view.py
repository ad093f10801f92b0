from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.pipelines.page.run_view import where
from ragspec.pipelines.page.tree_view import LONGEST, DraftView, draft_views, printed
from ragspec.reports.generation import report_of
from ragspec.reports.trace import Trace
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import NO_ORIGIN, PREDICTION, DraftKind, DraftTree
from tests.pipelines.page.test_page import sample_trace

WORDS = {1: " the", 2: " draft", 3: "s", 4: " tree", 5: " a", 9: "\n"}


def branching() -> DraftTree:
    """Return the tree of: the (draft (s), tree), a; of three sources."""
    return DraftTree(
        tokens=np.array([5, 1, 4, 2, 3]),
        parents=np.array([-1, -1, 1, 1, 3]),
        accept_prob=np.array([0.4, 0.9, 0.3, 0.25, 0.125], np.float32),
        source=np.array([2, 0, 1, 0, 0]),
        origin=np.array([NO_ORIGIN, (0, 40), NO_ORIGIN, (0, 41), (0, 42)]),
        sources=("context", "model", "recycling"),
        kind=DraftKind.DETERMINISTIC,
    )


def trace_of(*steps: Step, vocabulary: dict[int, str] | None = None) -> Trace:
    texts = tuple(tuple(WORDS.get(token, "?") for token in step.tokens) for step in steps)
    report = report_of(steps, [token for step in steps for token in step.tokens], 0.1, "stop")
    words = WORDS if vocabulary is None else vocabulary
    return Trace(steps, texts, report, words, documents=("a.md",))


def view_of(step: Step) -> DraftView:
    return draft_views(trace_of(step))[0]


def test_the_accepted_path_is_the_top_row_and_each_node_has_a_tip() -> None:
    view = view_of(Step(branching(), (1, 3), (1, 2, 9)))
    css = ["root", "s2", "s0 kept", "s3", "s0 kept", "s0", "own"]
    assert [node.css for node in view.nodes] == css
    selected = [node for node in view.nodes if "kept" in node.css.split()]
    assert [node.text for node in selected] == ["·the", "·draft"]
    assert view.accepted == 2
    top = sorted((node for node in view.nodes if node.row == 1), key=lambda n: n.column)
    assert [node.text for node in top] == ["prompt", "·the", "·draft", "↵"]
    assert top[-1].css == "own"
    tips = [node.tip for node in view.nodes]
    assert tips[1] == "“·a” · recycling\nclaimed reach 0.4 · not accepted"
    assert tips[2] == "“·the” · context · a.md, token 40\nclaimed reach 0.9 · accepted"
    assert tips[3] == "“·tree” · model\nclaimed reach 0.3 · not accepted"
    assert tips[6] == "“↵” · target model\nits own token after the accepted path"


def test_children_are_in_order_of_acceptance_probability_where_none_was_accepted() -> None:
    view = view_of(Step(branching(), (), (9,)))
    rows = {node.text: node.row for node in view.nodes}
    assert rows["↵"] < rows["·the"] < rows["·a"]
    assert rows["·the"] == rows["·tree"] < rows["·draft"] == rows["s"]
    assert view.caption == "5 drafted, 0 accepted, then “↵” by the target"


def test_a_text_that_ends_with_the_path_has_no_token_of_the_target() -> None:
    view = view_of(Step(branching(), (1, 3, 4), (1, 2)))
    assert "own" not in {node.css for node in view.nodes}
    assert view.caption == "5 drafted, 2 accepted, then the end"


def test_the_end_token_has_the_text_end() -> None:
    def trace(*texts: str) -> Trace:
        steps = (
            Step(DraftTree.chain([1, 0], "context"), (0,), (1, 2)),
            Step(DraftTree.chain([2, 0], "context"), (), (0,)),
        )
        result = trace_of(*steps, vocabulary={1: " the", 0: ""})
        return replace(result, texts=((" the", texts[0]), (texts[1],)))

    first, second = draft_views(trace(" a", ""))
    assert [node.text for node in first.nodes[1:]] == ["·the", "end", "·a"]
    assert [node.text for node in second.nodes[1:]] == ["·a", "end", "end"]
    assert second.caption == "2 drafted, 0 accepted, then the end"
    assert first.caption == "2 drafted, 1 accepted, then “·a” by the target"
    # Part of a character has no text either; a text may end with it at the limit of tokens.
    split = draft_views(trace("", " a"))[0]
    assert split.caption == "2 drafted, 1 accepted, then “#2” by the target"


def test_the_root_shows_the_text_before_the_step(tmp_path: Path) -> None:
    views = draft_views(sample_trace(tmp_path))
    assert [view.number for view in views] == [0, 1, 2, 3]
    assert [view.nodes[0].text for view in views[:2]] == ["prompt", "A·"]
    assert views[0].caption.startswith("nothing drafted, then “A·”")


@pytest.mark.parametrize(
    ("text", "display"),
    [
        (" a b", "·a·b"),
        ("\t\r\n", "⇥␍↵"),
        ("a\u202eb\x00", "a\ufffdb\ufffd"),
        ("x" * LONGEST, "x" * LONGEST),
        ("x" * (LONGEST + 1), "x" * (LONGEST - 1) + "…"),
    ],
)
def test_the_text_of_a_token_is_one_short_line(text: str, display: str) -> None:
    assert printed(text) == display


def test_a_draft_of_the_end_of_the_prompt_has_no_place() -> None:
    assert where([], (PREDICTION, -1)) == ""


@st.composite
def verified(draw: st.DrawFn) -> Step:
    """Draw a tree of any shape and a path through it."""
    n = draw(st.integers(0, 24))
    parents = [draw(st.integers(-1, i - 1)) for i in range(n)]
    tokens = draw(st.lists(st.integers(0, 12), min_size=n, max_size=n))
    accept_prob = draw(st.lists(st.floats(0, 1, width=32), min_size=n, max_size=n))
    path: list[int] = []
    while children := [i for i in range(n) if parents[i] == (path[-1] if path else -1)]:
        if draw(st.booleans()):
            break
        path.append(draw(st.sampled_from(children)))
    tree = DraftTree.build(tokens, parents, "context", accept_prob=accept_prob)
    return Step(tree, tuple(path), (*(tokens[node] for node in path), 1))


@given(verified())
def test_every_box_has_a_cell_beside_or_below_its_parent(step: Step) -> None:
    for view in draft_views(trace_of(step)):
        boxes = view.nodes
        cells = {(node.row, node.column) for node in boxes}
        assert len(cells) == len(boxes) and {row for row, _ in cells} == {*range(1, view.rows + 1)}
        parents = [int(parent) + 1 for parent in step.tree.parents]
        parents.append(step.path[-1] + 1 if step.path else 0)
        inner = set(parents)
        for box, parent in enumerate(parents, 1):
            assert boxes[box].column == boxes[parent].column + 1
            assert boxes[box].above == boxes[parent].row <= boxes[box].row
            inner.discard(parent if boxes[box].row == boxes[parent].row else -1)
        assert not inner  # a child stands beside every parent
        path = [node + 1 for node in step.path]
        assert {box for box, node in enumerate(boxes) if "kept" in node.css} == {*path}
        assert {boxes[box].row for box in path} <= {1}
