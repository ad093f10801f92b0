"""What a text in strides searches: a passage index, or whatever finds passages.

The best of the passages that earlier searches found is told by the measure of the search itself: a
passage that the search would put first, and that is among them, is guessed right. Ranks among the
known ones are not ranks in the index, so a fused guess may be wrong where both its parts are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

from ragspec.retrievers.search.fusion import Hit, Retriever, SearchMode
from ragspec.retrievers.search.nearest import FLAT
from ragspec.retrievers.search.passage_index import PassageIndex, Query
from ragspec.retrievers.search.sparse import SparseIndex
from ragspec.retrievers.speculation.schedule import MOST

Text = TypeVar("Text")


@dataclass(frozen=True, eq=False)
class RetrievedPassage:
    """A passage that was found; equal to another where both are the same place."""

    hit: Hit
    number: int = -1

    @cached_property
    def place(self) -> tuple[int, str, int, str]:
        """What tells passages apart."""
        passage = self.hit.passage
        return self.number, self.hit.document.name, passage.start, passage.text

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RetrievedPassage) and self.place == other.place

    def __hash__(self) -> int:
        return hash(self.place)


@dataclass(slots=True)
class IndexSearcher(Generic[Text]):
    """Searches a passage index; each query is embedded once. words: what to ask after a text."""

    index: PassageIndex
    words: Callable[[Sequence[Text]], str | None]
    mode: SearchMode
    most: int = MOST

    @property
    def further(self) -> float:
        """What each further query adds: little where one pass over all vectors serves them all."""
        dense = self.mode is SearchMode.DENSE and self.index.dense
        return 0.1 if dense and dense.nearest.kind == FLAT else 1.0

    def query(self, before: Sequence[Text]) -> Query | None:
        """Return the query after these strides."""
        words = self.words(before)
        return None if words is None else self.index.query(words, self.mode)

    def search(self, queries: Sequence[Query], k: int) -> list[list[RetrievedPassage]]:
        """Return the k best passages of each query."""
        ranked = self.index.ranked(queries, k, self.mode)
        return [
            [RetrievedPassage(hit, number) for number, hit in self.index.hits(each)]
            for each in ranked
        ]

    def guess(self, query: Query, known: Sequence[RetrievedPassage]) -> RetrievedPassage | None:
        """Return the known passage that the measure of the search puts first."""
        by_number = {result.number: result for result in known}
        best = self.index.best_of(query, sorted(by_number), self.mode)
        return None if best is None else by_number[best]


@dataclass(slots=True)
class RetrieverSearcher(Generic[Text]):
    """Searches by any `Retriever`, queries of a batch in threads; guesses by BM25 over known texts.

    So a service far away is asked for all guesses of a round in the time of one.
    """

    retriever: Retriever
    words: Callable[[Sequence[Text]], str | None]
    workers: int = 8
    _visible: tuple[RetrievedPassage, ...] = ()
    _scorer: SparseIndex | None = field(default=None)

    @property
    def most(self) -> int:
        """Queries that are asked in one batch."""
        return self.workers

    @property
    def further(self) -> float:
        """What each further query adds: little, in a thread of its own."""
        return 0.05

    def query(self, before: Sequence[Text]) -> str | None:
        """Return the query after these strides."""
        return self.words(before)

    def search(self, queries: Sequence[str], k: int) -> list[list[RetrievedPassage]]:
        """Return at most k passages of each query."""
        if len(queries) == 1:
            return [self._search(queries[0], k)]
        with ThreadPoolExecutor(min(self.workers, len(queries))) as pool:
            return list(pool.map(lambda query: self._search(query, k), queries))

    def _search(self, query: str, k: int) -> list[RetrievedPassage]:
        return [RetrievedPassage(hit) for hit in self.retriever.search(query, k)]

    def guess(self, query: str, known: Sequence[RetrievedPassage]) -> RetrievedPassage | None:
        """Return the known passage with the best BM25 score, None where none shares a word."""
        if not known:
            return None
        if self._scorer is None or self._visible != known:
            self._visible = tuple(known)
            self._scorer = SparseIndex.build([result.hit.passage.text for result in known])
        best = self._scorer.search(query, 1)
        return self._visible[best[0][0]] if best else None
