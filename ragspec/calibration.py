"""What drafters claim against what the target accepts: reach corrected while running.

A drafter's `reach` is a claim. Divided by the reach of its parent it claims that the node is
accepted once its parent is. That claim is corrected by how claims of its kind fared: per source,
per place (first child of the root, first child further down, later sibling) and per tenth of the
claim, with old evidence fading and the claim as the mean of a Beta prior; the claim scaled as the
source's other claims had to be, so that one lie is not believed again one level down.

Only children of nodes that the text visited count. They are the ones of which the outcome is
known whatever was verified, so the estimate is unbiased; and since the emitted tokens decide,
a draft that was cut or not verified at all teaches as much as one that was.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ragspec.draft import DraftTree
from ragspec.errors import InputError

BINS = 10
PLACES = 3
POOL = BINS * PLACES  # the index of the cell that counts all claims of a source
CELLS = POOL + 1
ROOT_CHILD, DEEPER, SIBLING = 0, BINS, 2 * BINS


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
        """Set the factor to what turns the mean claim into the mean of the Beta posterior."""
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

    def without(self, part: Cell, prior: float) -> Cell:
        """Return what this pool holds beyond one of its parts, corrected."""
        trials = self.trials - part.trials
        if trials <= 0.0:
            return Cell()
        hits = min(max(self.hits - part.hits, 0.0), trials)
        rest = Cell(trials, hits, min(max(self.claimed - part.claimed, 0.0), trials))
        rest.correct(prior)
        return rest


@dataclass(slots=True)
class Appraisal:
    """A proposed tree with its corrected reach [N], kept until its outcome is known."""

    tree: DraftTree
    reach: list[float]
    cells: list[tuple[Cell, Cell]]
    claims: list[float]


@dataclass(slots=True)
class Calibration:
    """Acceptance by source and kind of claim.

    prior: how many observations the claim itself is worth. decay: weight of the past at every
    observation of a cell.
    """

    prior: float = 3.0
    decay: float = 0.98
    cells: dict[str, list[Cell]] = field(default_factory=dict)

    def appraise(self, tree: DraftTree) -> Appraisal:
        """Return the corrected reach of every node; never more than the reach of its parent.

        One pass over plain lists: at the sizes of a draft this beats array operations.
        """
        tables = [self._table(name) for name in tree.sources]
        parents, claimed = tree.parents.tolist(), tree.reach.tolist()
        if len(tables) == 1:
            sources: Sequence[list[Cell]] = tables * len(parents)
        else:
            sources = [tables[source] for source in tree.source.tolist()]
        reach: list[float] = []
        cells: list[tuple[Cell, Cell]] = []
        claims: list[float] = []
        seen = [False] * (len(parents) + 1)  # the last entry is that of the root, -1
        for parent, claim, table in zip(parents, claimed, sources, strict=True):
            above, place = 1.0, ROOT_CHILD
            if parent >= 0:
                above, place = reach[parent], DEEPER
                claim = claim / claimed[parent] if claimed[parent] > 0.0 else 0.0
            if seen[parent]:
                place = SIBLING
            seen[parent] = True
            if not 0.0 <= claim < 1.0:  # NaN too: a claim of nothing
                claim = 1.0 if claim >= 1.0 else 0.0
            cell = table[place + min(int(claim * BINS), BINS - 1)]
            known = cell if cell.trials > 0.0 else table[POOL]
            reach.append(above * known.apply(claim))
            cells.append((cell, table[POOL]))
            claims.append(claim)
        return Appraisal(tree, reach, cells, claims)

    def learn(self, appraisal: Appraisal, tokens: Sequence[int]) -> int:
        """Count the outcome of every child of a visited node; `tokens` are what was emitted.

        Returns how many nodes of the proposal the text followed.
        """
        parents, drafts = appraisal.tree.parents.tolist(), appraisal.tree.tokens.tolist()
        visited = {-1: 0}
        for node, (parent, token) in enumerate(zip(parents, drafts, strict=True)):
            depth = visited.get(parent)
            if depth is None or depth >= len(tokens):
                continue
            hit = token == tokens[depth]
            if hit:
                visited[node] = depth + 1
            cell, pool = appraisal.cells[node]
            for each in (cell, pool):
                each.count(appraisal.claims[node], hit, self.decay)
            pool.correct(self.prior)
            cell.correct(self.prior, pool.without(cell, self.prior))
        return len(visited) - 1

    def fade(self, weight: float) -> None:
        """Scale all evidence by `weight`, so that claims are given another chance."""
        for table in self.cells.values():
            for cell in table:
                cell.trials *= weight
                cell.hits *= weight
                cell.claimed *= weight
            pool = table[POOL]
            pool.correct(self.prior)
            for cell in table[:POOL]:
                cell.correct(self.prior, pool.without(cell, self.prior))

    def copy(self) -> Calibration:
        """Return a calibration that shares nothing with this one."""
        return Calibration.from_dict(self.to_dict())

    def to_dict(self) -> dict[str, object]:
        """Return everything that was learned, for JSON."""
        tables = {
            name: [[cell.trials, cell.hits, cell.claimed, cell.factor] for cell in table]
            for name, table in self.cells.items()
        }
        return {"prior": self.prior, "decay": self.decay, "cells": tables}

    @classmethod
    def from_dict(cls, entry: dict[str, object]) -> Calibration:
        """Return the calibration that `to_dict` wrote; ValueError, KeyError, TypeError if not."""
        new = cls(prior=float(entry["prior"]), decay=float(entry["decay"]))  # type: ignore[arg-type]
        for name, rows in entry["cells"].items():  # type: ignore[attr-defined]
            if len(rows) != CELLS:
                raise InputError(
                    f"got {len(rows)} cells of calibration for source {name!r}, expected {CELLS}. "
                    "Make the profile again with this version."
                )
            new.cells[str(name)] = [
                Cell(float(t), float(h), float(c), float(f)) for t, h, c, f in rows
            ]
        return new

    def _table(self, source: str) -> list[Cell]:
        table = self.cells.get(source)
        if table is None:
            table = self.cells[source] = [Cell() for _ in range(CELLS)]
        return table
