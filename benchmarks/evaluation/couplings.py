"""The outcome of the draft at each place of a picture, as a grid of coloured cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SIDE, GAP = 20, 2
COLOURS: Mapping[str, str] = MappingProxyType(
    {"accepted": "s5", "reflected": "s1", "redrawn": "s4", "target": "own"}
)
MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "accepted": "the draft was accepted",
        "reflected": "the draft was reflected",
        "redrawn": "another latent replaced the draft",
        "target": "there was no draft",
    }
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One place with its tooltip."""

    x: int
    y: int
    css: str
    tip: str


@dataclass(frozen=True, slots=True)
class Grid:
    """The places of a picture, in rows."""

    cells: list[Cell]
    width: int
    height: int
    side: int = SIDE


def grid(outcomes: Sequence[Sequence[str]], distances: Sequence[Sequence[float]]) -> Grid:
    """Return the grid of outcomes.

    Args:
        outcomes: [h][w], keys of `COLOURS`.
        distances: [h][w], from the target's latent; NaN if unknown.
    """
    cells = []
    for row, names in enumerate(outcomes):
        for column, name in enumerate(names):
            difference = distances[row][column]
            off = "" if difference != difference else f", {difference:.4f} from the target's"
            tip = f"row {row + 1}, column {column + 1}: {MEANINGS[name]}{off}"
            place = (column * (SIDE + GAP), row * (SIDE + GAP))
            cells.append(Cell(*place, COLOURS[name], tip))
    high, wide = len(outcomes), len(outcomes[0])
    return Grid(cells, wide * (SIDE + GAP) - GAP, high * (SIDE + GAP) - GAP)
