"""Grids of pictures: what stands where, that nothing is clipped, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from ragspec.errors import InputError
from ragspec.visual.evaluation import Cell, Heading, grid
from ragspec.visual.evaluation.pictures import GROUND, MARGIN, RELAXED

RED, BLUE = (200, 0, 0), (0, 0, 200)
LONG = "one word and another and " * 12


def cell(colour: tuple[int, int, int], side: int = 8, lines: tuple[str, ...] = ()) -> Cell:
    return Cell(Image.new("RGB", (side, side), colour), lines)


def places(made: Image.Image, colour: tuple[int, int, int]) -> np.ndarray:
    return np.argwhere((np.asarray(made) == np.array(colour)).all(-1))


def test_pictures_of_a_column_and_of_a_row_stand_in_line() -> None:
    cells = [[cell(RED), cell(BLUE)], [cell(BLUE), cell(RED)]]
    heads = [Heading("a", ["one"]), Heading("b")]
    made = grid(cells, columns=heads, rows=["first", "second"], side=16)
    red, blue = places(made, RED), places(made, BLUE)
    assert len(red) == len(blue) == 2 * 16 * 16
    assert sorted(set(red[:, 0])) == sorted(set(blue[:, 0]))  # the same two rows
    assert sorted(set(red[:, 1])) == sorted(set(blue[:, 1]))  # the same two columns
    assert red[0].tolist() < blue[-1].tolist()


@pytest.mark.parametrize("text", ["short", LONG, "W" * 200])
def test_nothing_is_written_beyond_the_margins(text: str) -> None:
    cells = [[cell(RED, lines=(text, text)), cell(BLUE, lines=("a",))]]
    heads = [Heading(text, [text, "warned"], frozenset({1})), Heading("b")]
    made = grid(cells, columns=heads, rows=[text], title=text, notes=[text], foot=[text], side=16)
    ground = (np.asarray(made) == np.array(GROUND)).all(-1)
    edge = MARGIN - 6
    assert ground[:, :edge].all() and ground[:, -edge:].all()
    assert ground[:edge].all() and ground[-4:].all()
    first = int(places(made, RED)[:, 1].min())
    rows = places(made, RED)[:, 0]
    names = ground[rows.min() : rows.max(), : first - 2]
    assert names[:, -10:].all()  # names of rows end before the pictures begin
    assert len(places(made, RELAXED))


def test_a_long_name_makes_its_row_high_enough() -> None:
    names = [LONG, "b"]
    made = grid([[cell(RED)], [cell(BLUE)]], columns=[Heading("a")], rows=names, side=16)
    assert places(made, BLUE)[:, 0].min() - places(made, RED)[:, 0].min() >= 5 * 19


def test_more_lines_make_a_higher_grid() -> None:
    heights = [
        grid([[cell(RED, lines=("x",) * n)]], columns=[Heading("a")], rows=["r"]).height
        for n in (0, 3)
    ]
    assert heights[1] == heights[0] + 3 * 17


@pytest.mark.parametrize(
    ("cells", "rows"),
    [
        ([], []),
        ([[cell(RED)], [cell(RED), cell(RED)]], ["a", "b"]),
        ([[cell(RED)]], ["a", "b"]),
        ([[cell(RED)], [cell(RED, 9)]], ["a", "b"]),
    ],
)
def test_what_cannot_be_laid_out_is_refused(cells: list[list[Cell]], rows: list[str]) -> None:
    with pytest.raises(InputError, match="expected"):
        grid(cells, columns=[Heading("a")], rows=rows)
