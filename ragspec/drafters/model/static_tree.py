"""A tree of one shape for every draft, as in EAGLE (arXiv 2401.15077) and LANTERN++ (2502.06352).

Its nodes are places: the r-th choice after the place above. Which tokens fill them is computed
level by level, one forward each, as `coupled` computes first choices. Deviations: the choices are
those of a coupled draft, or the most probable ones (a distribution without noise), none are drawn;
shapes are made by rank, see `by_rank`, and no published list of nodes is built in.
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
    """Places of a tree, parents first. parents: -1 = below the root; ranks: 0 = first choice."""

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
        """The choices that are wanted after a place."""
        return max(self.ranks) + 1

    @property
    def depths(self) -> tuple[int, ...]:
        """The level of each place, 1 = below the root."""
        results: list[int] = []
        for parent in self.parents:
            results.append(1 if parent == ROOT else results[parent] + 1)
        return tuple(results)

    def inner_of(self, level: int) -> list[int]:
        """Return the places of a level that have children."""
        inner = set(self.parents)
        return [place for place, at in enumerate(self.depths) if at == level and place in inner]

    @classmethod
    def by_rank(cls, levels: Sequence[int] = LEVELS, width: int | None = None) -> TreeShape:
        """Return the tree whose levels hold so many places, those of the smallest rank products.

        width: the most choices after a place; None = the size of the first level. Raises
        InputError for sizes that this width cannot fill.
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
    """What was found after the root and after the places that were read.

    rows: of each such place (-1 = the root) its row. tokens i64, values f64 [R, K]: the best ones,
    best first, and their log-probabilities, up to a constant of the row.
    """

    rows: Mapping[int, int]
    tokens: Tensor
    values: Tensor


class StaticGrowth(CoupledGrowth):
    """Fills one shape, as far as depth and budget allow; see `CoupledGrowth`."""

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
        """Whether choices depend on the logits of their place alone: no noise, no processors."""
        return self.distribution.sampling.greedy and not self.distribution.processors

    def levels(self, budget: int, depth: int) -> int:
        """Return how many levels are read for a tree of at most these nodes and this depth."""
        selection, depths = self._rows_selected(budget), self.shape.depths
        filled: set[int] = {ROOT}
        for place, (parent, rank) in enumerate(self._places):
            if parent in filled and rank < selection:
                filled.add(place)
        filled.discard(ROOT)
        level = 0
        while level + 1 < depth and self.shape.inner_of(level + 1):
            if sum(depths[place] <= level for place in filled) >= budget:
                break
            level += 1
        return level

    def fill(self, result: PlaceChoices, budget: int, depth: int) -> DraftTree:
        """Return the tree that `grow` would return, whose choices were all found beforehand.

        depth: of the tree, at most one more than the levels that were read.
        """
        nodes = self._begin()
        chances = agreement(result.values, self.distribution.sampling.temperature, self.error)
        rows = listed(result.tokens, chances, self._rows_selected(budget))
        fresh, selected = [ROOT], list[int]()
        self._place_of = {ROOT: ROOT}
        while fresh:
            at = [result.rows[self._place_of[node]] for node in fresh]
            self._known.append((fresh, result.tokens[at], chances[at]))
            for node, row in zip(fresh, at, strict=True):
                nodes.add(node, *rows[row])
                if node != ROOT:
                    nodes.slots[node] = row - 1
            selected = self._selection_of(nodes, budget)
            fresh = self._unread(selected, depth)
        self._selection = sorted(selected)
        return self._tree()

    def _selection_of(self, nodes: CandidateNodes, budget: int) -> list[int]:
        """Return the candidates that fill a place, upper ones first."""
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

    def _fresh(self, selected: Sequence[int], draft_state: DraftState) -> list[int]:
        """Return the kept nodes whose children the shape wants, a level in one forward."""
        return self._unread(selected, draft_state.depth)

    def _unread(self, selected: Sequence[int], depth: int) -> list[int]:
        nodes = self._nodes
        return [
            node
            for node in selected
            if nodes.slots[node] < 0
            and nodes.depths[node] < depth
            and self._place_of[node] in self._inner
        ]
