"""A grid of pictures with names of rows and columns, and figures below every picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from evaluation.lettering import INK, SOFT, text, width_of, wrapped, write
from evaluation.pictures import BACKDROP, LINE, MARGIN, RELAXED, SMALLEST_SIDE, enlarged
from ragspec.errors import InputError

_TITLE, _NOTE, _HEAD, _SMALL = 21, 13, 16, 12  # pixels of letters
_STEP = 17  # from one small line to the next
_DISTANCE = 18  # between columns
_ROW_WIDTH = (64, 150)  # of the names of rows, least and most
_ROW_LINES, _ROW_STEP = 5, 19
_NARROWEST = 176  # a column on which figures can be read


@dataclass(frozen=True, slots=True)
class Cell:
    """A picture and the lines below it, of which the first is the most important one."""

    image: Image.Image
    lines: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands above a column: its name, lines below that, and the numbers of those in red."""

    name: str
    lines: Sequence[str] = ()
    warned: frozenset[int] = frozenset()


def grid(
    cells: Sequence[Sequence[Cell]],
    *,
    columns: Sequence[Heading],
    rows: Sequence[str],
    title: str = "",
    notes: Sequence[str] = (),
    foot: Sequence[str] = (),
    side: int = SMALLEST_SIDE,
) -> Image.Image:
    """Return the pictures of all cells, row by row, each enlarged to about `side` pixels.

    cells [R][C]; columns: C; rows: R names. notes stand below the title, `foot` below the grid.
    Raises InputError where counts or sizes of pictures differ, or where there is none.
    """
    _check(cells, columns, rows)
    picture = enlarged(cells[0][0].image, side)
    plan = _plan(cells, columns, rows, notes, foot, picture.size, bool(title))
    canvas = Image.new("RGB", (plan.width, plan.height), BACKDROP)
    draw = ImageDraw.Draw(canvas)
    inner = plan.width - 2 * MARGIN
    if title:
        write(draw, (MARGIN, MARGIN - 4), title, _TITLE, most=inner)
    for number, line in enumerate(plan.notes):
        write(draw, (MARGIN, plan.note_top + number * (_STEP + 1)), line, _NOTE, SOFT)
    _rule(draw, plan.head_top - 10, plan.width)
    for number, heading in enumerate(columns):
        _head(draw, (plan.x(number), plan.head_top), heading, plan.column)
    for row, (name, line_of) in enumerate(zip(rows, cells, strict=True)):
        top = plan.top + row * plan.row
        _rule(draw, top - 10, plan.width)
        for number, part in enumerate(wrapped(name, 14, plan.names, _ROW_LINES)):
            write(draw, (MARGIN, top + number * _ROW_STEP), part, 14)
        for column, cell in enumerate(line_of):
            _cell(canvas, draw, (plan.x(column), top), cell, side, plan.column)
    for number, line in enumerate(plan.foot):
        at = (MARGIN, plan.foot_top + number * _STEP)
        write(draw, at, line, _SMALL, SOFT)
    return canvas


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where everything stands, in pixels."""

    width: int
    height: int
    names: int
    column: int
    row: int
    note_top: int
    head_top: int
    top: int
    foot_top: int
    notes: Sequence[str]
    foot: Sequence[str]

    def x(self, column: int) -> int:
        """Return the left edge of a column."""
        return MARGIN + self.names + _DISTANCE + column * (self.column + _DISTANCE)


def _plan(
    cells: Sequence[Sequence[Cell]],
    columns: Sequence[Heading],
    rows: Sequence[str],
    notes: Sequence[str],
    foot: Sequence[str],
    size: tuple[int, int],
    titled: bool,
) -> _Plan:
    least, most = _ROW_WIDTH
    said = [text(name) for name in rows]
    wide = [width_of(word, 14) for name in said for word in name.split()]
    wide += [width_of(name, 14) / 3 for name in said]  # so that long ones take few lines
    names = round(min(most, max([least, *wide]) + 4))
    column = max(size[0], _NARROWEST)
    width = 2 * MARGIN + names + len(columns) * (column + _DISTANCE)
    above = [part for note in notes for part in wrapped(note, _NOTE, width - 2 * MARGIN, 3)]
    below = [part for line in foot for part in wrapped(line, _SMALL, width - 2 * MARGIN, 3)]
    note_top = MARGIN + (30 if titled else 0)
    head_top = note_top + len(above) * (_STEP + 1) + 20
    lines = max(len(heading.lines) for heading in columns)
    top = head_top + 24 + lines * _STEP + 18
    most_lines = max(len(cell.lines) for row in cells for cell in row)
    said_lines = max(len(wrapped(name, 14, names, _ROW_LINES)) for name in rows)
    row_height = max(size[1] + 6 + most_lines * _STEP, said_lines * _ROW_STEP) + 20
    foot_top = top + len(rows) * row_height
    height = foot_top + len(below) * _STEP + (MARGIN if below else 0)
    return _Plan(
        *(width, height, names, column, row_height, note_top, head_top, top, foot_top),
        *(above, below),
    )


def _head(draw: ImageDraw.ImageDraw, at: tuple[int, int], heading: Heading, width: int) -> None:
    x, y = at
    write(draw, at, heading.name, _HEAD, most=width)
    for number, line in enumerate(heading.lines):
        colour = RELAXED if number in heading.warned else SOFT if number else INK
        write(draw, (x, y + 24 + number * _STEP), line, _SMALL, colour, most=width)


def _cell(
    canvas: Image.Image,
    draw: ImageDraw.ImageDraw,
    at: tuple[int, int],
    cell: Cell,
    side: int,
    width: int,
) -> None:
    image = enlarged(cell.image, side)
    x, y = at
    canvas.paste(image, at)
    draw.rectangle([x - 1, y - 1, x + image.width, y + image.height], outline=LINE)
    for number, line in enumerate(cell.lines):
        place = (x, y + image.height + 6 + number * _STEP)
        write(draw, place, line, _SMALL, INK if number == 0 else SOFT, most=width)


def _rule(draw: ImageDraw.ImageDraw, y: int, width: int) -> None:
    draw.line([(MARGIN, y), (width - MARGIN, y)], LINE)


def _check(
    cells: Sequence[Sequence[Cell]], columns: Sequence[Heading], rows: Sequence[str]
) -> None:
    counts = [len(row) for row in cells]
    if not columns or not cells or len(rows) != len(cells) or set(counts) != {len(columns)}:
        raise InputError(
            f"got rows of {counts} pictures for {len(rows)} names of rows and {len(columns)} of "
            "columns; expected one name each, and as many pictures in every row as columns."
        )
    sizes = {cell.image.size for row in cells for cell in row}
    if len(sizes) > 1:
        raise InputError(f"got pictures of sizes {sorted(sizes)}; expected one size on a grid.")
