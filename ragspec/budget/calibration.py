"""What drafters claim against what the target accepts: reach corrected while running.

A drafter's `reach` is a claim. Divided by the reach of its parent it claims that the node is
accepted once its parent is. That claim is corrected by how claims of its kind fared:
- by source, rank among siblings, depth, and size of the claim (which stands for the length of a
  match where a source copies), with the claim scaled as the source's others had to be for prior;
- for first-ranked children, by the token after which they stand: copies end with sentences (of
  sampled drafts at the root only: what is kept of one may not hang on the tokens drawn).
Old evidence fades. Which sources agree on a node was tried as a third correction: on a few thousand
tokens it learned more noise than truth.

Only children of nodes that the text visited count. They are the ones of which the outcome is
known whatever was verified, so the estimate is unbiased; and since the emitted tokens decide,
a draft that was cut or not verified at all teaches as much as one that was.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from ragspec.errors import InputError
from ragspec.trees.draft_tree import DRAWN, DraftTree

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


STEADY, MANY = 0.995, 20.0  # decay and prior of what was reached: all nodes count, not only few


UNKNOWN = -1  # the token before the root where it is not told


@dataclass(slots=True)
class Appraisal:
    """A proposed tree with its corrected reach [N], kept until its outcome is known.

    tables, cells: where the outcome of each node counts. claims: what the cells correct; followed:
    these claims so corrected, which `ends`, the cells of the tokens before, correct once more.
    """

    tokens: list[int]
    parents: list[int]
    tables: list[Table]
    reach: list[float] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    claims: list[float] = field(default_factory=list)
    ends: list[Cell | None] = field(default_factory=list)
    followed: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Calibration:
    """Acceptance by source and kind of claim.

    prior: how many observations the claim itself is worth. decay: weight of the past at every
    observation of a cell.
    """

    prior: float = 3.0
    decay: float = 0.98
    tables: dict[str, Table] = field(default_factory=dict)
    reached: list[Cell] = field(default_factory=lambda: [Cell() for _ in range(BINS)])

    def foresee(self, tree: DraftTree) -> list[float]:
        """Return the reach [N] of a tree as trees with such claims were reached by the text.

        What is chosen among many claims is too good to be true, and along a path it adds up.
        """
        seen: list[float] = []
        for parent, claim in zip(tree.parents.tolist(), tree.reach.tolist(), strict=True):
            value = self.reached[bisect_right(EDGES, claim)].apply(claim)
            seen.append(value if parent < 0 else min(value, seen[parent]))
        return seen

    def look_back(self, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Count which nodes of a verified tree the emitted tokens reached."""
        depths = {-1: 0}
        for node, (parent, token, claim) in enumerate(
            zip(tree.parents.tolist(), tree.tokens.tolist(), tree.reach.tolist(), strict=True)
        ):
            depth = depths.get(parent)
            hit = depth is not None and depth < len(tokens) and tokens[depth] == token
            if hit and depth is not None:
                depths[node] = depth + 1
            self.reached[bisect_right(EDGES, claim)].count(min(claim, 1.0), hit, STEADY)
        for cell in self.reached:
            cell.correct(MANY)

    def appraise(self, tree: DraftTree, root: int = UNKNOWN) -> Appraisal:
        """Return the corrected reach of every node; never more than the reach of its parent.

        root: the last committed token. One pass over plain lists: at the sizes of a draft this
        beats array operations.
        """
        tables = [self._table(name) for name in tree.sources]
        tokens, parents, claimed = tree.tokens.tolist(), tree.parents.tolist(), tree.reach.tolist()
        new = Appraisal(tokens, parents, [tables[source] for source in tree.source.tolist()])
        drawn = tree.kind in DRAWN
        depths: list[int] = []
        ranks = [0] * (len(parents) + 1)  # the last entry is that of the root, -1
        reach = new.reach
        for parent, claim, table in zip(parents, claimed, new.tables, strict=True):
            above, depth, rank = 1.0, 0, ranks[parent]
            if parent >= 0:
                above, depth = reach[parent], depths[parent] + 1
                claim = claim / claimed[parent] if claimed[parent] > 0.0 else 0.0
            ranks[parent] = rank + 1
            depths.append(depth)
            if not 0.0 <= claim < 1.0:  # NaN too: a claim of nothing
                claim = 1.0 if claim >= 1.0 else 0.0
            cell, end = table.cells[place_of(rank, depth, claim)], None
            value = (cell if cell.trials > 0.0 else table.cells[POOL]).apply(claim)
            if rank == 0 and (parent < 0 or not drawn):
                end = table.after(root if parent < 0 else tokens[parent])
            new.cells.append(cell)
            new.claims.append(claim)
            new.ends.append(end)
            new.followed.append(value)
            reach.append(above * (value if end is None else end.apply(value)))
        return new

    def learn(self, appraisal: Appraisal, tokens: Sequence[int]) -> int:
        """Count the outcome of every child of a visited node; `tokens` are what was emitted.

        Returns how many nodes of the proposal the text followed.
        """
        visited = {-1: 0}
        for node, (parent, token) in enumerate(
            zip(appraisal.parents, appraisal.tokens, strict=True)
        ):
            depth = visited.get(parent)
            if depth is None or depth >= len(tokens):
                continue
            hit = token == tokens[depth]
            if hit:
                visited[node] = depth + 1
            self._count(appraisal, node, hit)
        return len(visited) - 1

    def _count(self, appraisal: Appraisal, node: int, hit: bool) -> None:
        cell, pool = appraisal.cells[node], appraisal.tables[node].cells[POOL]
        for each in (cell, pool):
            each.count(appraisal.claims[node], hit, self.decay)
        pool.correct(self.prior)
        cell.correct(self.prior, pool)
        end = appraisal.ends[node]
        if end is not None:
            end.count(appraisal.followed[node], hit, self.decay)
            end.correct(2.0 * self.prior)

    def fade(self, weight: float) -> None:
        """Scale all evidence by `weight`, so that claims are given another chance."""
        for table in list(self.tables.values()):  # another thread may add one
            table.fade(weight, self.prior)

    def copy(self) -> Calibration:
        """Return a calibration that shares nothing with this one."""
        return Calibration.from_dict(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return everything that was learned, for JSON."""
        tables = {name: table.to_dict() for name, table in list(self.tables.items())}
        reached = [numbers_of(cell) for cell in self.reached]
        return {"prior": self.prior, "decay": self.decay, "tables": tables, "reached": reached}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Calibration:
        """Return the calibration that `to_dict` wrote; ValueError, KeyError, TypeError if not."""
        new = cls(prior=float(entry["prior"]), decay=float(entry["decay"]))
        for name, table in entry["tables"].items():
            new.tables[str(name)] = Table.from_dict(table, f"source {name!r}")
        new.reached = [cell_of(numbers) for numbers in entry["reached"]]
        if len(new.reached) != BINS:
            raise ValueError(f"{len(new.reached)} cells of what was reached, expected {BINS}")
        return new

    def _table(self, source: str) -> Table:
        table = self.tables.get(source)
        if table is None:
            table = self.tables[source] = Table()
        return table
