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
from typing import Any

from ragspec.cells import BINS, EDGES, POOL, Cell, Table, cell_of, numbers_of, place_of
from ragspec.draft import DraftKind, DraftTree

STEADY, MANY = 0.995, 20.0  # decay and prior of what was reached: all nodes count, not only few
UNKNOWN = -1  # the token before the root where it is not told
DRAWN = (DraftKind.SAMPLED, DraftKind.SAMPLED_WITHOUT_REPLACEMENT)


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
