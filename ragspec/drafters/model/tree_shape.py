"""The shapes of static trees, as in EAGLE (arXiv 2401.15077) and LANTERN++ (2502.06352).

A shape consists of places: a place is the r-th choice after its parent place. Deviation: shapes are
built by rank, see `TreeShape.by_rank`; no published list is included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from ragspec.errors import InputError
from ragspec.trees.draft_tree import ROOT
from ragspec.trees.operations import depths

LEVELS = (4, 8, 8, 4, 2)


@dataclass(frozen=True, slots=True)
class TreeShape:
    """The places of a static tree, parents first.

    Attributes:
        parents: Parent place of each place; -1 is the root.
        ranks: Rank of each place among the choices after its parent; 0 is the first choice.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        places = list(zip(self.parents, self.ranks, strict=True))
        ordered = all(ROOT <= parent < i for i, (parent, _) in enumerate(places))
        if not places or not ordered or len(set(places)) < len(places) or min(self.ranks) < 0:
            raise InputError(
                f"got a tree of parents {self.parents} and ranks {self.ranks}; expected at least "
                "one place, parents first (-1 = the root), and no rank twice below one parent."
            )

    @property
    def width(self) -> int:
        """The largest number of choices after a place."""
        return max(self.ranks) + 1

    @property
    def depths(self) -> tuple[int, ...]:
        """The level of each place, 1 = below the root."""
        return tuple(depths(np.array(self.parents)).tolist())

    def levels_read(self, budget: int, depth: int) -> int:
        """Return how many levels are read for the first `budget` places within a depth."""
        by_level = sorted(self.depths)
        return min(by_level[min(budget, len(by_level)) - 1], depth) - 1

    @classmethod
    def by_rank(cls, levels: Sequence[int] = LEVELS) -> Self:
        """Return the shape with the places of the smallest rank products in every level.

        Args:
            levels: Number of places per level; the first is the most choices after a place.

        Raises:
            InputError: A level has a size that so many choices cannot fill.
        """
        most = levels[0] if levels else 0
        above: list[tuple[int, int]] = [(1, ROOT)]
        parents, ranks = list[int](), list[int]()
        for size in levels:
            offers = sorted((w * (rank + 1), at, rank) for w, at in above for rank in range(most))
            if not 1 <= size <= len(offers):
                raise InputError(
                    f"got {size} places in one level; expected 1 to {len(offers)} below "
                    f"{len(above)} places of {most} choices."
                )
            above = [(weight, len(parents) + i) for i, (weight, *_) in enumerate(offers[:size])]
            parents += [parent for _, parent, _ in offers[:size]]
            ranks += [rank for *_, rank in offers[:size]]
        return cls(tuple(parents), tuple(ranks))
