"""The law of a kNN language model while a text is decoded: by searching, or by guessing.

Both give the engine a transform. The one searches the datastore wherever the rule looks; the other
takes the neighbours from a cache, and notes what is to be checked by a search of all at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ragspec.retrievers.knn.cache import NeighbourCache
from ragspec.retrievers.knn.datastore import Datastore
from ragspec.retrievers.knn.mixture import Mixture
from ragspec.retrievers.knn.nearest_keys import Neighbours
from ragspec.retrievers.search.nearest import Floats
from ragspec.sampling.distribution import TokenDistribution
from ragspec.sampling.transform import TextStart
from ragspec.trees.draft_tree import ROOT, DraftTree

NAME = "knn"
TOGETHER = 16  # of a draft's nodes that are searched with the root, in one pass over the keys


@dataclass(frozen=True, slots=True)
class Knn:
    """A datastore and how it counts: k neighbours, in a mixture."""

    store: Datastore
    k: int
    mixture: Mixture

    def search(self, states: Floats) -> list[Neighbours]:
        """Return the neighbours of states f32 [Q, H]."""
        return self.store.search(states, self.k)

    def logits(self, logits: torch.Tensor, result: Neighbours) -> torch.Tensor:
        """Return the mixed law f64 [1, V] from the target's logits [1, V]."""
        return self.mixture.logits(logits, self.store.values[result.numbers], result.distances)


@dataclass(frozen=True, slots=True, eq=False)
class KnnQuery:
    """A place of the text that was guessed: the state f32 [H], the target's logits [1, V].

    index: the generated index of the token that follows.
    """

    state: Floats
    logits: torch.Tensor
    index: int


class First(NamedTuple):
    """A place whose token was searched for, and what the cache had for it before, if anything."""

    place: KnnQuery
    guessed: Neighbours | None


class Searching:
    """Makes the law of a text by searching for every token: what the text is defined by.

    cache: takes what is found, for guesses to come. first: the first place that was asked.
    times: of each search when it began, its queries and milliseconds.
    """

    name = NAME
    reads_hidden = True

    def __init__(self, knn: Knn, cache: NeighbourCache | None = None) -> None:
        self._knn = knn
        self._cache = cache
        self._states: Floats = np.zeros((0, knn.store.width), np.float32)
        self._matches: dict[int, Neighbours] = {}
        self.distribution: TokenDistribution | None = None
        self.times: list[tuple[float, int, float]] = []
        self.first: First | None = None

    def open(self, start: TextStart) -> Searching:
        """Serve one text."""
        self.distribution = start.distribution
        return self

    def forward(self, states: torch.Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Search for the root and the likeliest nodes together."""
        assert states is not None
        self._states = on_host(states)
        self._matches = {}
        together = TOGETHER if self._knn.store.near.further < 0.5 else 0  # one pass for all, or not
        self._search(range(ROOT, min(len(self._states) - 1, together)))

    def logits(self, node: int, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Return the mixed law after a node."""
        if node not in self._matches:
            self._search([node])
        result = self._matches[node]
        if self._cache is not None:
            if self.first is None:
                state = self._states[node + 1]
                guessed = self._cache.nearest(state, self._knn.k) if self._cache.size else None
                self.first = First(KnnQuery(state, logits.clone(), index), guessed)
            self._cache.add(result)
        return self._knn.logits(logits, result)

    def _search(self, nodes: Sequence[int]) -> None:
        began = time.perf_counter()
        result = self._knn.search(self._states[[node + 1 for node in nodes]])
        self.times.append((began, len(nodes), 1000.0 * (time.perf_counter() - began)))
        self._matches.update(zip(nodes, result, strict=True))


@dataclass(slots=True)
class Guessing:
    """Makes the law from a cache, or from the target alone, and notes every place that was asked.

    alone: no neighbours count.
    """

    knn: Knn
    cache: NeighbourCache
    alone: bool = False
    name: str = NAME
    reads_hidden: bool = True
    queries: list[KnnQuery] = field(default_factory=list)
    distribution: TokenDistribution | None = None
    _states: Floats = field(default_factory=lambda: np.zeros((0, 0), np.float32))

    def open(self, start: TextStart) -> Guessing:
        """Serve one text."""
        self.distribution = start.distribution
        return self

    def forward(self, states: torch.Tensor | None, tree: DraftTree, tokens: Sequence[int]) -> None:
        """Take the states."""
        assert states is not None
        self._states = on_host(states)

    def logits(self, node: int, logits: torch.Tensor, index: int) -> torch.Tensor:
        """Return the guessed law after a node."""
        state = self._states[node + 1]
        self.queries.append(KnnQuery(state, logits.clone(), index))
        if self.alone:
            return logits
        return self.knn.logits(logits, self.cache.nearest(state, self.knn.k))


def on_host(states: torch.Tensor) -> Floats:
    """Return states as a float32 array of their own."""
    result: Floats = states.float().cpu().numpy()
    return result
