"""Drafts of one shape, whose levels are computed one after the other or in one call.

The places of a shape (see `tree_shape`) hold the choices of a coupled draft, or the most probable
tokens (a distribution without noise); none are drawn. A level takes one forward, or all levels take
one step of fixed shape if the cache has such steps (see `level_step`).
"""

from collections.abc import Sequence
from dataclasses import replace

from ragspec.drafters.model.coupled import CoupledGrowth, agreement, listed
from ragspec.drafters.model.growth import CONTENDERS, DraftState
from ragspec.drafters.model.level_step import read_places
from ragspec.drafters.model.tree_shape import TreeShape
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree


class StaticGrowth(CoupledGrowth):
    """Fills one shape within the depth and the budget; see `CoupledGrowth`."""

    def __init__(
        self, distribution: TokenDistribution, name: str, shape: TreeShape, kind: DraftKind
    ) -> None:
        super().__init__(distribution, name, shape.width, kind)
        self.shape, self._candidates = shape, shape.width
        self._children: dict[int, list[tuple[int, int]]] = {}  # rank and place, by parent place
        places = zip(shape.parents, shape.ranks, range(len(shape.ranks)), strict=True)
        for parent, rank, place in sorted(places):
            self._children.setdefault(parent, []).append((rank, place))
        self._places: dict[int, int] = {}  # by node

    def grow(self, draft_state: DraftState) -> DraftTree:
        """Return a tree of the shape below the text of `draft_state`."""
        levels = self.shape.levels_read(draft_state.budget, draft_state.depth)
        tokens, cache, choices = draft_state.context.tokens, draft_state.cache, None
        # Choices that depend on noise or processors, not only on logits, are made by the host.
        if self.distribution.sampling.greedy and not self.distribution.processors:
            choices = cache.draft(tokens, self.shape, levels, CONTENDERS)
        if choices is None:
            return super().grow(draft_state)
        self._begin(replace(draft_state, depth=levels + 1))
        best, perturbed = choices
        chances = agreement(perturbed, self.distribution.sampling.temperature, self.error)
        first, rows = listed(best, chances, self._candidates), read_places(self.shape, levels).rows
        fresh = [ROOT]
        while fresh:
            at = [rows[self._places[node]] for node in fresh]
            self._add(fresh, best[at], chances[at], [first[row] for row in at])
            for node, row in zip(fresh, at, strict=True):
                if node != ROOT:
                    self._nodes.slots[node] = row - 1
            fresh = self._unread()
        return self._tree()

    def _begin(self, draft_state: DraftState) -> None:
        super()._begin(draft_state)
        self._places = {ROOT: ROOT}

    def _ranks(self, parent: int, chances: Sequence[float]) -> Sequence[int]:
        """Return the ranks of the choices that fill a place, within the budget."""
        start = len(self._nodes)
        children = [
            (rank, place)
            for rank, place in self._children[self._places[parent]]
            if rank < len(chances) and chances[rank] > 0.0
        ][: self._draft.budget - start]
        self._places.update((start + i, place) for i, (_, place) in enumerate(children))
        return [rank for rank, _ in children]

    def _unread(self) -> list[int]:
        """Return the nodes with children in the shape that were not read yet."""
        nodes = self._nodes
        self._selection = range(len(nodes))
        if len(nodes) == self._draft.budget:
            return []
        return [
            node
            for node in self._selection
            if nodes.slots[node] < 0
            and nodes.depths[node] < self._draft.depth
            and self._places[node] in self._children
        ]
