from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.pipelines.console.terminal import STYLES
from ragspec.pipelines.page.charts import COLOURS, colours_of, preferred, slots_of
from ragspec.reports.builder import accepted_of
from ragspec.rules.base import Step
from ragspec.trees.draft_tree import DraftTree

LISTED = ("context", "model", "rest", "recycling", "suffix", "hierarchy", "rasd", "prediction")


def test_the_sources_of_the_house_have_a_colour_each() -> None:
    assert len({preferred()[name] for name in LISTED}) == len(LISTED) == COLOURS


@pytest.mark.parametrize("others", [(), ("model",), LISTED[1:], ("answers", "statistics", "mine")])
def test_a_source_keeps_its_colour_whoever_else_is_there(others: tuple[str, ...]) -> None:
    assert slots_of(["context", *others])["context"] == slots_of(["context"])["context"] == 0


@given(st.lists(st.sampled_from([*preferred(), "mine", "yours", "é", ""]), unique=True, max_size=8))
def test_no_two_of_a_page_look_alike(names: list[str]) -> None:
    slots = slots_of(names)
    assert set(slots) == set(names)
    assert len(set(slots.values())) == len(names)
    assert slots == slots_of(names[::-1])


def test_more_sources_than_colours_are_still_displayed() -> None:
    slots = slots_of([f"source {i}" for i in range(3 * COLOURS)])
    assert set(slots.values()) == set(range(COLOURS))


def test_the_source_that_gave_most_comes_first() -> None:
    steps = [
        Step(DraftTree.chain([1, 2, 3], "few"), (0,), (1, 9)),
        Step(DraftTree.chain([1, 2, 3], "many"), (0, 1, 2), (1, 2, 3, 9)),
        Step(DraftTree.chain([1], "never"), (), (9,)),
    ]
    assert list(colours_of(steps)) == ["many", "few", "never"]
    assert all(a != b for a, b in combinations(colours_of(steps).values(), 2))


def test_a_path_that_a_stop_has_cut_counts_as_far_as_it_stands() -> None:
    assert accepted_of(Step(DraftTree.chain([1, 2, 3], "context"), (0, 1, 2), (1, 2))) == (0, 1)


def test_the_terminal_has_a_style_for_every_colour() -> None:
    styles = [STYLES.get(f"s{slot}") for slot in range(COLOURS)]
    assert None not in styles
    assert len(set(styles)) == COLOURS
