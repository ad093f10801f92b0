"""Sheets, heat-maps and comparisons: sizes, what is drawn where, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from ragspec.errors import InputError
from ragspec.visual.evaluation import lettering, pictures
from ragspec.visual.evaluation.pictures import Column, comparison, heat_map, maps_of, sheet


def picture(colour: tuple[int, int, int], side: int = 8) -> Image.Image:
    return Image.new("RGB", (side, side), colour)


def test_a_sheet_shows_every_image_enlarged_without_smoothing() -> None:
    colours = [(10 * n, 0, 0) for n in range(1, 7)]
    made = sheet([picture(colour) for colour in colours], columns=3, side=16)
    pixels = np.asarray(made)
    for colour in colours:
        assert (pixels == np.array(colour)).all(-1).sum() == 16 * 16
    assert made.width > made.height


def test_a_sheet_has_room_for_title_and_captions() -> None:
    images = [picture((0, 0, 0))] * 2
    plain = sheet(images, side=32)
    told = sheet(images, ["one", "a caption that is much too long"], title="both", side=32)
    assert told.height > plain.height and told.width == pictures.NARROWEST > plain.width
    wide = sheet(images * 20, title="all")
    assert wide.width > pictures.NARROWEST


def test_the_title_of_a_single_image_is_not_cut() -> None:
    said = "cat face · seed 1 · exact"
    made = np.asarray(sheet([picture((0, 0, 0))], title=said))
    inked = np.argwhere((made[: pictures.MARGIN + 20] < 128).all(-1))[:, 1]
    written = lettering.font(18).getlength(said)
    assert inked.max() - inked.min() > 0.95 * written


def test_full_rows_are_preferred() -> None:
    assert [pictures._columns(count) for count in (1, 2, 4, 9, 12)] == [1, 2, 4, 3, 6]


def test_a_large_image_is_made_smaller_and_a_clear_one_shows_the_ground() -> None:
    assert pictures.enlarged(picture((1, 2, 3), 300), 100).size == (100, 100)
    clear = pictures.enlarged(Image.new("RGBA", (4, 4), (0, 0, 0, 0)), 4)
    assert clear.getpixel((0, 0)) == pictures.GROUND


@pytest.mark.parametrize(
    "given", [([],), ([picture((0, 0, 0)), picture((0, 0, 0), 9)],), ([picture((0, 0, 0))], "ab")]
)
def test_a_sheet_refuses_what_it_cannot_lay_out(given: tuple[object, ...]) -> None:
    with pytest.raises(InputError, match="expected"):
        sheet(*given)  # type: ignore[arg-type]


def test_the_map_of_forwards_gives_each_code_its_neighbours_in_time() -> None:
    found = maps_of([1, 2, 4, 1], (2, 4))
    assert found.tolist() == [[1, 2, 2, 4], [4, 4, 4, 1]]
    assert maps_of([1, 1], (1, 3)).tolist() == [[1, 1, 0]]
    with pytest.raises(InputError, match="at most 4"):
        maps_of([3, 2], (2, 2))


def test_a_heat_map_colours_by_length_and_marks_what_was_relaxed() -> None:
    grey = picture((128, 128, 128))
    slow = np.asarray(heat_map(grey, np.ones((4, 4), np.int64), side=64), dtype=int)
    fast = np.asarray(heat_map(grey, np.full((4, 4), 16), side=64), dtype=int)
    assert fast.mean() > slow.mean()  # lightness rises with the codes of a forward
    relaxed = np.zeros((4, 4), dtype=bool)
    relaxed[2, 1] = True
    dotted = np.asarray(heat_map(grey, np.full((4, 4), 16), relaxed, side=64), dtype=int)
    changed = np.argwhere((dotted != fast).any(-1))
    assert changed.min(0).tolist() >= [32, 16] and changed.max(0).tolist() < [48, 32]


def test_a_heat_map_frames_the_code_at_which_pictures_part() -> None:
    made = np.asarray(
        heat_map(picture((9, 9, 9)), np.ones((4, 4), np.int64), parted=(2, 1), side=64)
    )
    red = np.argwhere((made == np.array(pictures.RELAXED)).all(-1))
    assert red.min(0).tolist() == [32, 16] and red.max(0).tolist() == [47, 31]


@pytest.mark.parametrize("ground", [(0, 0, 0), (255, 255, 255), (255, 200, 0)])
def test_the_colours_of_a_heat_map_are_like_those_of_the_key(ground: tuple[int, int, int]) -> None:
    for number, colour in enumerate(pictures.RAMP, start=1):
        made = heat_map(picture(ground), np.full((4, 4), number), side=64)
        shown = np.asarray(made.getpixel((8, 8)), dtype=int)
        assert abs(shown - np.asarray(colour)).max() <= 50


def test_a_heat_map_refuses_maps_of_other_shapes() -> None:
    with pytest.raises(InputError, match=r"\[h, w\]"):
        heat_map(picture((0, 0, 0)), np.ones(4, np.int64))
    with pytest.raises(InputError, match=r"\[h, w\]"):
        heat_map(picture((0, 0, 0)), np.ones((4, 4), np.int64), np.zeros((2, 2), bool))


def test_a_comparison_holds_all_columns_and_refuses_uneven_ones() -> None:
    one, two = [picture((200, 0, 0))] * 2, [picture((0, 0, 200))] * 2
    made = comparison([Column("a", "x", one), Column("b", "y", two)], title="t", notes=["n"])
    pixels = np.asarray(made)
    for colour in ((200, 0, 0), (0, 0, 200)):
        assert (pixels == np.array(colour)).all(-1).sum() == 2 * 256 * 256
    with pytest.raises(InputError, match="equally many"):
        comparison([Column("a", "", one), Column("b", "", two[:1])])
    with pytest.raises(InputError, match="at least one"):
        comparison([])


def test_a_comparison_names_its_rows_and_tells_of_dots_where_there_are_some() -> None:
    columns = [Column("a", "", [picture((0, 0, 0))] * 2)]
    plain = comparison(columns)
    assert comparison(columns, rows=["one", "two"]).height == plain.height + 2 * 20
    red = np.array(pictures.RELAXED)
    shown = [np.asarray(comparison(columns, dots=dots)) for dots in (True, False)]
    assert [bool((pixels == red).all(-1).any()) for pixels in shown] == [True, False]
    with pytest.raises(InputError, match="got 1 names for 2 rows"):
        comparison(columns, rows=["one"])
