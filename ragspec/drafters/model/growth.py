"""The growth of draft trees from a model's distributions: one loop for coupled and sampled drafts.

A growth reads nodes of the tree with the draft model, adds children below them, and chooses the
nodes that the next forward reads. Its subclasses decide which children and which nodes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ragspec.drafters.base import DraftContext, NodeChances
from ragspec.drafters.model.cache import DraftCache
from ragspec.sampling.distribution import TokenDistribution
from ragspec.trees.draft_tree import ROOT, DraftKind, DraftTree

CONTENDERS = 64  # tokens of a distribution that are compared after each node


@dataclass(frozen=True, slots=True)
class DraftState:
    """The start of a draft and the limits of its growth.

    Attributes:
        cache: Can read the text.
        budget: Largest number of nodes.
        depth: Largest depth of a node.
        min_expected_gain: Growth ends when the next forward is expected to add fewer accepted
            nodes.
    """

    cache: DraftCache
    context: DraftContext
    budget: int
    depth: int
    min_expected_gain: float = 0.0


@dataclass(slots=True)
class DraftNodes:
    """The nodes of a growing draft, parents first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    accept_prob: list[float] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)  # 1 = below the root
    slots: list[int] = field(default_factory=list)  # of the cache; -1 for an unread node

    def __len__(self) -> int:
        return len(self.tokens)

    def depth(self, node: int) -> int:
        """Return the depth of a node, 0 for the root."""
        return 0 if node == ROOT else self.depths[node]

    def add(self, parent: int, tokens: Sequence[int], chances: Sequence[float]) -> None:
        """Add the children of a node, with the probabilities that they are accepted after it."""
        count, depth = len(tokens), 1 + self.depth(parent)
        above = 1.0 if parent == ROOT else self.accept_prob[parent]
        self.tokens += tokens
        self.parents += [parent] * count
        self.accept_prob += [above * chance for chance in chances]
        self.depths += [depth] * count
        self.slots += [-1] * count

    def path(self, node: int) -> list[int]:
        """Return the draft tokens from below the root to the node."""
        path: list[int] = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def read(self, cache: DraftCache, nodes: Sequence[int]) -> Tensor:
        """Read R nodes with the model; return their logits [R, v].

        Nodes with the same path share one cache slot.
        """
        rows, distinct, first = list[int](), dict[tuple[int, int], int](), cache.drafted
        for node in nodes:
            parent = self.parents[node]
            slot = ROOT if parent == ROOT else self.slots[parent]
            row = distinct.setdefault((slot, self.tokens[node]), len(distinct))
            rows.append(row)
            self.slots[node] = first + row
        logits = cache.extend([t for _, t in distinct], [slot for slot, _ in distinct])
        if len(distinct) == len(nodes):
            return logits
        return logits[torch.tensor(rows, device=logits.device)]


class Growth(ABC):
    """Grows the drafts of one row.

    Args:
        distribution: That of the target, without processors that keep state.
        name: The source name of the nodes.

    Attributes:
        whole: Whether it needs logits of all tokens.
    """

    whole = True
    _draft: DraftState  # the current draft, or the last one

    def __init__(self, distribution: TokenDistribution, name: str, kind: DraftKind) -> None:
        self.distribution, self.name, self.kind = distribution, name, kind
        self._nodes = DraftNodes()
        self._selection: Sequence[int] = ()  # the nodes of the tree

    def grow(self, draft_state: DraftState) -> DraftTree:
        """Return a draft below the text of `draft_state`."""
        self._begin(draft_state)
        cache, context = draft_state.cache, draft_state.context
        nodes, fresh, processors = self._nodes, [ROOT], self.distribution.processors
        with cache.lease():
            logits = cache.read(context.tokens)
            while True:
                logits = cache.whole(logits) if self.whole else logits
                if processors:
                    paths = [nodes.path(node) for node in fresh]
                    logits = self.distribution.process(logits, context.tokens, paths)
                self._expand(fresh, logits)
                fresh = self._unread()
                if not fresh:
                    return self._tree()
                logits = nodes.read(cache, fresh)

    def _begin(self, draft_state: DraftState) -> None:
        """Forget the last draft."""
        self._draft, self._nodes = draft_state, DraftNodes()

    @abstractmethod
    def _expand(self, parents: Sequence[int], logits: Tensor) -> None:
        """Add the children of R nodes, given the processed logits after them.

        They are [R, V], or [R, v] of `DraftCache.tokens` unless it needs the `whole`.
        """

    @abstractmethod
    def _unread(self) -> list[int]:
        """Return the nodes that the next forward reads; none to end the draft."""

    def _tree(self) -> DraftTree:
        """Return the selected nodes."""
        nodes, selection = self._nodes, self._selection
        place = {node: i for i, node in enumerate(selection)} | {ROOT: ROOT}
        return DraftTree.build(
            [nodes.tokens[i] for i in selection],
            [place[nodes.parents[i]] for i in selection],
            self.name,
            accept_prob=[nodes.accept_prob[i] for i in selection],
            kind=self.kind,
        )

    @abstractmethod
    def distributions(self) -> list[NodeChances]:
        """Return the distributions at the root and at the read nodes of the last draft."""

    def learn(self, tokens: Sequence[int]) -> None:
        """Learn from the target's choices after the nodes of the last draft; nothing by default."""
        return None
