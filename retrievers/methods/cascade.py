"""Cascade: several sources in order, each filling the budget that those before it leave.

The order of the databases in Hierarchy Drafting (arXiv 2502.05609): the nearer in time a source is,
the earlier it drafts. Deviations: nodes are counted instead of branches, and shared prefixes once;
each source keeps a part of the budget for its sure nodes, so none can starve the others; other
nodes are taken by their acceptance probability, whichever source offers them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ragspec.drafters.base import DraftContext, Drafter, DraftRequest
from ragspec.drafters.combined import Combined
from ragspec.drafters.fuse import PATIENCE, Source, SourcesSession, as_kind
from ragspec.errors import InputError
from ragspec.trees.draft_tree import DraftTree
from ragspec.trees.operations import keep_best, overlay, select, share_out

RESERVE = 0.2
SURE = 0.1


class Cascade(Combined):
    """Drafts with several drafters in order of trust.

    Args:
        reserve: Share of the budget that each later drafter keeps for its sure nodes.
        sure: Acceptance probability from which a node counts as sure.
        patience: See `Source`. A drafter that fails is switched off.

    Attributes:
        most_nodes: Limit of every tree besides the budget, None for no limit.

    Raises:
        InputError: There is no drafter, or the reserves leave the first one nothing.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        *,
        reserve: float = RESERVE,
        sure: float = SURE,
        patience: float | None = PATIENCE,
        name: str = "cascade",
    ) -> None:
        if not drafters or not 0.0 <= reserve * (len(drafters) - 1) < 1.0:
            raise InputError(
                f"got {len(drafters)} drafters and a reserve of {reserve}; expected at least one "
                "drafter, and less than the whole budget reserved for the later ones."
            )
        super().__init__(name, drafters)
        self.reserve = reserve
        self.sure = sure
        self.patience = patience
        self.most_nodes: int | None = None

    def open(self, request: DraftRequest) -> CascadeSession:
        """Return a session that holds one session of every drafter."""
        return CascadeSession(self, request)


class CascadeSession(SourcesSession):
    """The sources of one row, in order; see `Cascade`."""

    def __init__(self, cascade: Cascade, request: DraftRequest) -> None:
        super().__init__(Source(drafter, request, cascade.patience) for drafter in cascade.drafters)
        self._cascade = cascade
        self._kind = cascade.kind

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        """Return a tree of at most `budget` nodes, filled source after source."""
        if self._cascade.most_nodes is not None:
            budget = min(budget, self._cascade.most_nodes)
        if budget < 1:
            return DraftTree.empty(self._kind)
        trees = [source.propose(context, budget) for source in self._sources]
        offered = [as_kind(tree, self._kind) for tree in trees if len(tree)]
        if not offered:
            return DraftTree.empty(self._kind)
        if len(offered) == 1:
            return keep_best(offered[0], budget)
        merged, offers = overlay([(tree, 1 << i) for i, tree in enumerate(offered)])
        if len(merged) <= budget:
            return share_out(merged)
        reserve = int(self._cascade.reserve * budget)
        chosen = fill(merged, offers, len(offered), budget, reserve, self._cascade.sure)
        return share_out(select(merged, sorted(chosen)))


def fill(
    tree: DraftTree, offers: Sequence[int], sources: int, budget: int, reserve: int, sure: float
) -> set[int]:
    """Return the nodes of a merged tree that fill a budget, with all their ancestors.

    Args:
        offers: By node, the sources that offer it as bits, the first source lowest.
        reserve: Nodes reserved for each later source, if it has as many of at least `sure`.
    """
    parents, accept_prob = tree.parents.tolist(), tree.accept_prob.tolist()
    best = sorted(range(len(tree)), key=lambda node: -accept_prob[node])
    certain = [node for node in best if accept_prob[node] >= sure]
    waiting = [min(reserve, sum(offers[node] >> i & 1 for node in certain)) for i in range(sources)]
    chosen: set[int] = set()
    for i in range(sources):
        room = budget - sum(waiting[i + 1 :])
        for node in certain:
            if len(chosen) >= room:
                break
            if offers[node] >> i & 1:
                _take(node, parents, chosen, room)
    for node in best:
        if len(chosen) >= budget:
            break
        _take(node, parents, chosen, budget)
    return chosen


def _take(node: int, parents: Sequence[int], chosen: set[int], room: int) -> None:
    """Add a node and its ancestors to the chosen ones, if they all fit."""
    path = []
    while node >= 0 and node not in chosen:
        path.append(node)
        node = parents[node]
    if len(chosen) + len(path) <= room:
        chosen.update(path)
