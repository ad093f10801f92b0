"""The grid of what became of drafts."""

from __future__ import annotations

from math import nan

from ragspec.pipelines.page.couplings import COLOURS, GAP, MEANINGS, SIDE, grid
from ragspec.visual.latents.judged import OUTCOMES


def test_every_place_has_its_colour_and_says_what_it_is() -> None:
    made = grid([["own", "kept"], ["reflected", "redrawn"]], [[nan, 0.01234], [nan, nan]])
    assert [cell.css for cell in made.cells] == ["own", "s5", "s1", "s4"]
    assert [(cell.x, cell.y) for cell in made.cells][3] == (SIDE + GAP, SIDE + GAP)
    assert made.width == made.height == 2 * SIDE + GAP
    assert made.cells[1].tip == (
        "row 1, column 2: the draft was kept, 0.0123 from the target's own"
    )
    assert made.cells[0].tip == "row 1, column 1: no draft stood there"


def test_every_outcome_has_a_colour() -> None:
    assert set(OUTCOMES) == set(COLOURS) == set(MEANINGS)
