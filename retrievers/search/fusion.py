"""Retrievers, and the fusion of dense and sparse search by reciprocal ranks.

Cormack, Clarke and Buettcher 2009, "Reciprocal Rank Fusion outperforms Condorcet and individual
rank learning methods": score = sum over lists of weight / (k + rank), rank from 1, k = 60. The
weights and other values of k are ours: with a much weaker list, a small k lets the strong one lead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passages import Passage

CANDIDATES = 100

Ranking = list[tuple[int, float]]
# Returns (text, score, meta) triples, best first.
SearchFunction = Callable[[str], Sequence[tuple[str, float, Mapping[str, Any]]]]


class SearchMode(StrEnum):
    """The lists that a search uses."""

    DENSE = "dense"
    SPARSE = "sparse"
    FUSED = "fused"


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage of a search, with its document, score, and rank (from 1) in each list."""

    document: Document
    passage: Passage
    score: float
    ranks: Mapping[str, int] = field(default_factory=dict)


@runtime_checkable
class Retriever(Protocol):
    """A search for passages."""

    def search(self, query: str, k: int) -> list[Hit]:
        """Return at most k hits, best first."""


class FunctionRetriever:
    """A search function as a Retriever.

    The function returns (text, score, meta) triples, best first. Each text counts as a document,
    and `meta` may have its "name" (or "source") and "title".
    """

    def __init__(self, function: SearchFunction) -> None:
        self._function = function

    def search(self, query: str, k: int) -> list[Hit]:
        """Return the first k results as hits.

        Raises:
            InputError: A result is no such triple.
        """
        return [self._hit(number, item) for number, item in enumerate(self._function(query)[:k])]

    def _hit(self, number: int, item: tuple[str, float, Mapping[str, Any]]) -> Hit:
        try:
            text, score, meta = item
            name = str(meta.get("name") or meta.get("source") or f"result {number + 1}")
            title = str(meta.get("title") or name)
            score = float(score)
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"The search function returned {item!r}, expected (text, score, meta): a string, "
                "a number and a mapping."
            ) from error
        if not isinstance(text, str):
            raise InputError(f"The search function returned a {type(text).__name__} as the text.")
        passage = Passage(number, 0, len(text), title, text)
        return Hit(Document(name, title, text), passage, score, {"function": number + 1})


def as_retriever(source: Retriever | SearchFunction) -> Retriever:
    """Return a Retriever unchanged and a search function wrapped, else raise InputError."""
    if isinstance(source, Retriever):
        return source
    if callable(source):
        return FunctionRetriever(source)
    raise InputError(
        f"Got a {type(source).__name__} as the retriever, expected an object with "
        "search(query, k) or a function from a string to (text, score, meta) triples."
    )


@dataclass(frozen=True, slots=True)
class Fusion:
    """The constant k and the weights of the dense and the sparse list in a fusion."""

    k: float = 60.0
    dense: float = 1.0
    sparse: float = 1.0

    def __post_init__(self) -> None:
        if self.k < 0 or min(self.dense, self.sparse) < 0:
            raise InputError(f"Got {self}; expected k and weights of 0 or more.")


EQUAL = Fusion()
# Chosen on training questions for the bundled embedder, whose ranks are weaker than BM25's.
STATIC = Fusion(k=2.0, dense=0.25)


def fuse_rankings(
    rankings: Mapping[str, Ranking], fusion: Fusion = EQUAL
) -> list[tuple[int, float, dict[str, int]]]:
    """Join the "dense" and the "sparse" ranking by reciprocal-rank fusion.

    Args:
        rankings: (passage number, score), best first, by the name of the list.

    Returns:
        (passage number, fused score, rank in each list), best first; ties by number.
    """
    ranks: dict[int, dict[str, int]] = {}
    for name, ranking in rankings.items():
        for rank, (number, _) in enumerate(ranking, 1):
            ranks.setdefault(number, {})[name] = rank
    weight = {"dense": fusion.dense, "sparse": fusion.sparse}
    fused = [
        (number, sum(weight[name] / (fusion.k + rank) for name, rank in places.items()))
        for number, places in ranks.items()
    ]
    fused.sort(key=lambda item: (-item[1], item[0]))
    return [(number, score, ranks[number]) for number, score in fused]
