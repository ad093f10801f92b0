"""The searchers of speculative retrieval: over a passage index, or over any `Retriever`.

A guess ranks the passages of earlier searches by the scores of the search itself, so it is right if
the passage that the search would rank first is among them. Ranks among known passages are not ranks
in the index, so a fused guess may be wrong although both its parts are right.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ragspec.retrievers.search.fusion import Hit, Retriever, SearchMode, search_hits
from ragspec.retrievers.search.nearest import FLAT
from ragspec.retrievers.search.passage_index import PassageIndex, Query
from ragspec.retrievers.search.sparse import SparseIndex
from ragspec.retrievers.speculation.os3 import MOST

Text = TypeVar("Text")
REPEATS = 8  # queries that are repeated for a retriever


@dataclass(frozen=True)
class RetrievedPassage:
    """A passage of a search; equal to another one of the same number, document, title and text."""

    hit: Hit = field(compare=False)
    number: int = -1
    place: tuple[str, int, str, str] = field(init=False)

    def __post_init__(self) -> None:
        passage = self.hit.passage
        place = self.hit.document.name, passage.start, passage.title, passage.text
        object.__setattr__(self, "place", place)


@dataclass(slots=True)
class IndexSearcher(Generic[Text]):
    """Searches a passage index; each query is embedded once.

    Attributes:
        words: Returns the query after the strides so far, None for no search.
        most: Most queries of one search.
    """

    index: PassageIndex
    words: Callable[[Sequence[Text]], str | None]
    mode: SearchMode
    most: int = MOST

    @property
    def further(self) -> float:
        """Relative cost of each further query: low if one pass over all vectors serves all."""
        dense = self.mode is SearchMode.DENSE and self.index.dense
        return 0.1 if dense and dense.nearest.kind == FLAT else 1.0

    def query(self, before: Sequence[Text]) -> Query | None:
        """Return the query after these strides."""
        words = self.words(before)
        return None if words is None else self.index.query(words, self.mode)

    def search(self, queries: Sequence[Query], k: int) -> list[list[RetrievedPassage]]:
        """Return the k best passages of each query."""
        rows = self.index.ranked(queries, k, self.mode)
        return [[RetrievedPassage(self.index.hit(*each), each[0]) for each in row] for row in rows]

    def guess(self, query: Query, known: Sequence[RetrievedPassage]) -> RetrievedPassage | None:
        """Return the known passage with the best score of the search, None without any."""
        by_number = {passage.number: passage for passage in known}
        best = self.index.best_of(query, sorted(by_number), self.mode)
        return None if best is None else by_number[best]


@dataclass(slots=True)
class RetrieverSearcher(Generic[Text]):
    """Searches with any `Retriever`, and guesses by BM25 over known texts.

    The queries of a batch run in threads: a remote service answers all in the time of one. The
    first batches repeat a query, for one passage: an answer may depend on its query alone.

    Attributes:
        query: Returns the query after the strides so far, None for no search.
        most: Most queries of one batch, each in a thread.
        further: Relative cost of each further query of a batch.
        repeats: Whether each repeated query had the same answer again; shared by texts.
    """

    retriever: Retriever
    query: Callable[[Sequence[Text]], str | None]
    most: int = 8
    further: float = 0.05
    repeats: list[bool] = field(default_factory=list)
    _indexed: tuple[RetrievedPassage, ...] = ()  # by `_scorer`
    _scorer: SparseIndex | None = field(default=None)

    def search(self, queries: Sequence[str], k: int) -> list[list[RetrievedPassage]]:
        """Return at most k passages of each query."""
        if len(queries) == 1:
            return [self._search(queries[0], k)]
        repeated = queries[: len(self.repeats) < REPEATS]
        with ThreadPoolExecutor(min(self.most, len(queries)) + len(repeated)) as pool:
            again = [pool.submit(self._search, query, 1) for query in repeated]
            answers = list(pool.map(lambda query: self._search(query, k), queries))
        self.repeats += [future.result() == answers[0][:1] for future in again]
        return answers

    def _search(self, query: str, k: int) -> list[RetrievedPassage]:
        return [RetrievedPassage(hit) for hit in search_hits(self.retriever, query, k)]

    def guess(self, query: str, known: Sequence[RetrievedPassage]) -> RetrievedPassage | None:
        """Return the known passage with the best BM25 score, None if none shares a word."""
        if not known:
            return None
        if self._scorer is None or self._indexed != known:
            self._indexed = tuple(known)
            self._scorer = SparseIndex.build([passage.hit.passage.text for passage in known])
        best = self._scorer.search(query, 1)
        return self._indexed[best[0][0]] if best else None
