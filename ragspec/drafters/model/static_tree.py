"""A tree of one shape for every draft, as in EAGLE (arXiv 2401.15077) and LANTERN++ (2502.06352).

The shape consists of places: a place is the r-th choice after its parent place. The tokens of the
places are computed level by level, one forward each, as `coupled` computes first choices.
Deviations: choices are those of a coupled draft, or the most probable ones (a distribution without
noise); none are drawn. Shapes are built by rank, see `by_rank`; no published list is included.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from ragspec.drafters.model.cache import DraftState
from ragspec.drafters.model.coupled import CandidateNodes, CoupledGrowth, agreement, listed
from ragspec.errors import InputError
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import ROOT, DraftTree

LEVELS = (4, 8, 8, 4, 2)
_NOWHERE = -2


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
        levels: list[int] = []
        for parent in self.parents:
            levels.append(1 if parent == ROOT else levels[parent] + 1)
        return tuple(levels)

    def inner_of(self, level: int) -> list[int]:
        """Return the places of a level that have children."""
        inner = set(self.parents)
        return [place for place, at in enumerate(self.depths) if at == level and place in inner]

    @classmethod
    def by_rank(cls, levels: Sequence[int] = LEVELS, width: int | None = None) -> TreeShape:
        """Return the shape with the places of the smallest rank products in every level.

        Args:
            levels: Number of places per level.
            width: Largest number of choices after a place; None for the size of the first level.

        Raises:
            InputError: A level has a size that this width cannot fill.
        """
        most = width or (levels[0] if levels else 0)
        above: list[tuple[int, int]] = [(1, ROOT)]
        parents: list[int] = []
        ranks: list[int] = []
        for size in levels:
            offers = sorted((w * (rank + 1), at, rank) for w, at in above for rank in range(most))
            if not 1 <= size <= len(offers):
                raise InputError(
                    f"got {size} places in one level; expected 1 to {len(offers)} below "
                    f"{len(above)} places of {most} choices."
                )
            above = []
            for weight, parent, rank in offers[:size]:
                above.append((weight, len(parents)))
                parents.append(parent)
                ranks.append(rank)
        return cls(tuple(parents), tuple(ranks))


@dataclass(frozen=True, slots=True, eq=False)
class PlaceChoices:
    """The best tokens after the root and after the read places.

    Attributes:
        rows: Row of each such place (-1 = root).
        tokens: Best tokens of each row, best first, i64 [R, K].
        values: Their log-probabilities up to a constant per row, f64 [R, K].
    """

    rows: Mapping[int, int]
    tokens: Tensor
    values: Tensor


class StaticGrowth(CoupledGrowth):
    """Fills one shape within the depth and the budget; see `CoupledGrowth`."""

    def __init__(self, distribution: TokenDistribution, name: str, shape: TreeShape) -> None:
        super().__init__(distribution, name, shape.width)
        self.shape = shape
        self._inner = set(shape.parents)
        self._places = {
            pair: place for place, pair in enumerate(zip(shape.parents, shape.ranks, strict=True))
        }
        self._place_of: dict[int, int] = {}

    @property
    def blind(self) -> bool:
        """Whether choices depend only on the logits of their place: no noise, no processors."""
        return self.distribution.sampling.greedy and not self.distribution.processors

    def levels(self, budget: int, depth: int) -> int:
        """Return how many levels are read for a tree of at most `budget` nodes and this depth."""
        candidates, depths = self._candidates_per_node(budget), self.shape.depths
        filled: set[int] = {ROOT}
        for place, (parent, rank) in enumerate(self._places):
            if parent in filled and rank < candidates:
                filled.add(place)
        filled.discard(ROOT)
        level = 0
        while level + 1 < depth and self.shape.inner_of(level + 1):
            if sum(depths[place] <= level for place in filled) >= budget:
                break
            level += 1
        return level

    def fill(self, choices: PlaceChoices, budget: int, depth: int) -> DraftTree:
        """Return the tree of `grow` from choices that are already computed.

        Args:
            depth: Depth of the tree, at most one more than the levels that were read.
        """
        nodes = self._nodes = CandidateNodes()
        self._known = []
        chances = agreement(choices.values, self.distribution.sampling.temperature, self.error)
        rows = listed(choices.tokens, chances, self._candidates_per_node(budget))
        fresh, selection = [ROOT], list[int]()
        self._place_of = {ROOT: ROOT}
        while fresh:
            at = [choices.rows[self._place_of[node]] for node in fresh]
            self._known.append((fresh, choices.tokens[at], chances[at]))
            for node, row in zip(fresh, at, strict=True):
                nodes.add(node, *rows[row])
                if node != ROOT:
                    nodes.slots[node] = row - 1
            selection = self._selection_of(nodes, budget)
            fresh = self._unread(selection, depth)
        self._selection = sorted(selection)
        return self._tree()

    def _selection_of(self, nodes: CandidateNodes, budget: int) -> list[int]:
        """Return the candidates that fill a place, parents first."""
        place_of: dict[int, int] = {ROOT: ROOT}
        siblings: Counter[int] = Counter()
        for node, parent in enumerate(nodes.parents):
            rank = siblings[parent]
            siblings[parent] += 1
            place = self._places.get((place_of.get(parent, _NOWHERE), rank))
            if place is not None:
                place_of[node] = place
        del place_of[ROOT]
        self._place_of = place_of
        return list(place_of)[:budget]

    def _fresh(self, selection: Sequence[int], draft_state: DraftState) -> list[int]:
        return self._unread(selection, draft_state.depth)

    def _unread(self, selection: Sequence[int], depth: int) -> list[int]:
        """Return the selected nodes with children in the shape that were not read yet."""
        nodes = self._nodes
        return [
            node
            for node in selection
            if nodes.slots[node] < 0
            and nodes.depths[node] < depth
            and self._place_of[node] in self._inner
        ]
