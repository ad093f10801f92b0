"""The counts behind a calibration: one cell for each kind of claim, one table for each source."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ragspec.errors import InputError

# Claims are told apart finely near 1, where long copies live or die.
EDGES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.93, 0.97)
BINS = len(EDGES) + 1
DEPTHS = (1, 3, 8, 16)  # first-ranked children: at the root, and in these depths below
SECOND, LATER = len(DEPTHS) + 1, len(DEPTHS) + 2
POOL = BINS * (LATER + 1)  # the index of the cell that counts all claims of a source
CELLS = POOL + 1
MOST_TOKENS = 8192  # tokens that a table keeps a cell for


def place_of(rank: int, depth: int, claim: float) -> int:
    """Return the index of the cell for a claim of a sibling's rank at a depth (0 = root child)."""
    place = bisect_right(DEPTHS, depth) if rank == 0 else SECOND if rank == 1 else LATER
    return place * BINS + bisect_right(EDGES, claim)


@dataclass(slots=True)
class Cell:
    """Faded counts of one kind of claim, and the correction that follows from them.

    factor <= 1 scales the claim down; factor in (1, 2] scales the distance from 1 down by
    2 - factor. Either way larger claims stay larger.
    """

    trials: float = 0.0
    hits: float = 0.0
    claimed: float = 0.0
    factor: float = 1.0

    def apply(self, claim: float) -> float:
        """Return the corrected claim, in [0, 1]."""
        if self.factor <= 1.0:
            return claim * self.factor
        return 1.0 - (1.0 - claim) * (2.0 - self.factor)

    def count(self, claim: float, hit: bool, decay: float) -> None:
        """Add one outcome; what was counted before weighs `decay` of what it did."""
        self.trials = self.trials * decay + 1.0
        self.claimed = self.claimed * decay + claim
        self.hits = self.hits * decay + hit

    def correct(self, prior: float, others: Cell | None = None) -> None:
        """Set the factor to what turns the mean claim into the mean of the Beta posterior.

        others: the cell that scales the claim for its prior; None takes the claim as it is.
        """
        if self.trials <= 0.0:
            self.factor = others.factor if others else 1.0
            return
        mean = self.claimed / self.trials
        expected = others.apply(mean) if others else mean
        found = (self.hits + prior * expected) / (self.trials + prior)
        if found <= mean:
            self.factor = found / mean if mean > 0.0 else 1.0
        elif mean < 1.0:
            self.factor = 2.0 - (1.0 - found) / (1.0 - mean)

    def fade(self, weight: float) -> None:
        """Scale the evidence by `weight`."""
        self.trials *= weight
        self.hits *= weight
        self.claimed *= weight


@dataclass(slots=True)
class Table:
    """The cells of one source: by kind of claim, and by the token after which it was made."""

    cells: list[Cell] = field(default_factory=lambda: [Cell() for _ in range(CELLS)])
    ends: dict[int, Cell] = field(default_factory=dict)

    def after(self, token: int) -> Cell | None:
        """Return the cell for claims that follow `token`; None where there is no room for one."""
        cell = self.ends.get(token)
        if cell is None and token >= 0 and len(self.ends) < MOST_TOKENS:
            cell = self.ends[token] = Cell()
        return cell

    def fade(self, weight: float, prior: float) -> None:
        """Scale all evidence by `weight` and correct anew."""
        for cell in (*self.cells, *self.ends.values()):
            cell.fade(weight)
        pool = self.cells[POOL]
        pool.correct(prior)
        for cell in self.cells[:POOL]:
            cell.correct(prior, pool)
        for cell in self.ends.values():
            cell.correct(2.0 * prior)

    def to_dict(self) -> dict[str, Any]:
        """Return the cells that hold anything, for JSON."""
        return {
            "cells": {str(i): numbers_of(c) for i, c in enumerate(self.cells) if c != Cell()},
            "ends": {str(i): numbers_of(c) for i, c in list(self.ends.items()) if c != Cell()},
        }

    @classmethod
    def from_dict(cls, entry: dict[str, Any], what: str) -> Table:
        """Return what `to_dict` wrote; ValueError, KeyError or TypeError on anything else."""
        new = cls()
        for key, numbers in entry["cells"].items():
            place = int(key)
            if not 0 <= place < CELLS:
                raise InputError(
                    f"got cell {place} of the calibration of {what}, expected 0 .. {CELLS - 1}. "
                    "Make the profile again with this version."
                )
            new.cells[place] = cell_of(numbers)
        new.ends = {int(key): cell_of(numbers) for key, numbers in entry["ends"].items()}
        return new


def numbers_of(cell: Cell) -> list[float]:
    """Return a cell for JSON."""
    return [cell.trials, cell.hits, cell.claimed, cell.factor]


def cell_of(numbers: Any) -> Cell:
    """Return what `numbers_of` gave; raises ValueError or TypeError on anything else."""
    trials, hits, claimed, factor = map(float, numbers)
    # Beyond these bounds a claim would grow past that of the node above it.
    if not (0.0 <= factor <= 2.001 and all(0.0 <= n < inf for n in (trials, hits, claimed))):
        raise ValueError(f"counts {[trials, hits, claimed, factor]} of a cell")
    return Cell(trials, hits, claimed, min(factor, 2.0))
