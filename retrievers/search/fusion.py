"""Retrievers, and the fusion of dense and sparse search by reciprocal ranks.

Cormack, Clarke and Buettcher 2009, "Reciprocal Rank Fusion outperforms Condorcet and individual
rank learning methods": score = sum over lists of weight / (k + rank), rank from 1, k = 60. The
weights and other values of k are ours: with a much weaker list, a small k lets the strong one lead.
"""

import inspect
import math
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import sha256
from itertools import islice
from typing import Any, NoReturn, Protocol, runtime_checkable

from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.passages import Passage

Ranking = list[tuple[int, float]]
# Takes a query, and k if it has a parameter of that name; returns (text, score, meta) triples, best
# first.
SearchFunction = Callable[..., Iterable[tuple[str, float, Mapping[str, Any]]]]


class SearchMode(StrEnum):
    """The lists that a search uses."""

    DENSE = "dense"
    SPARSE = "sparse"
    FUSED = "fused"

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise InputError(f"got {value!r} as the search mode; expected {', '.join(cls)}.")


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage of a search, with its document, score, and rank (from 1) in each list.

    Attributes:
        copies: Names of other documents with the same passage.
    """

    document: Document
    passage: Passage
    score: float
    ranks: Mapping[str, int] = field(default_factory=dict)
    copies: tuple[str, ...] = ()

    @property
    def names(self) -> str:
        """The names of all documents with the passage."""
        return self.document.name + (f" (also {', '.join(self.copies)})" if self.copies else "")


@runtime_checkable
class Retriever(Protocol):
    """A search for passages."""

    def search(self, query: str, k: int) -> list[Hit]:
        """Return at most k hits, best first."""


class FunctionRetriever:
    """A search function as a Retriever.

    Each text counts as a document, and `meta` may have its "name" (or "source") and "title". A text
    without a name is named by its hash.
    """

    def __init__(self, function: SearchFunction) -> None:
        self._function = function
        name = function.__name__ if inspect.isroutine(function) else type(function).__name__
        self._owner = f"The search function {name}"
        self._takes_k = _accepts(function, "query", k=1)

    def search(self, query: str, k: int) -> list[Hit]:
        """Return the first k results with text as hits; raise InputError for other results."""
        results = self._function(query, k=k) if self._takes_k else self._function(query)
        every = enumerate(_listed(results, self._owner, "a list of (text, score, meta) triples"))
        hits = (self._hit(number, item) for number, item in every)
        return list(islice((hit for hit in hits if hit.passage.text.strip()), k))

    def _hit(self, number: int, item: tuple[str, float, Mapping[str, object]]) -> Hit:
        try:
            text, score, meta = item
            digest = sha256(text.encode()).hexdigest()
            name, title = meta.get("name") or meta.get("source"), meta.get("title")
            score = float(score)
        except (TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self._owner} returned {item!r}, expected (text, score, meta): a string of "
                "characters that UTF-8 has, a number and a mapping."
            ) from error
        if not math.isfinite(score):
            raise InputError(f"{self._owner} returned the score {score}, expected a number.")
        name = str(name or f"text {digest[:12]}")
        title = str(title or name)
        passage = Passage(number, 0, len(text), title, text)
        return Hit(Document(name, title, text), passage, score, {"function": number + 1})


def _accepts(function: Callable[..., object], *values: object, **named: object) -> bool:
    """Return whether a function can be called so, and has the named parameters; True if unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions of C tell none
        return not named
    try:
        signature.bind(*values, **named)
    except TypeError:
        return False
    return named.keys() <= signature.parameters.keys()


def _listed(results: object, owner: str, expected: str) -> Iterable[Any]:
    """Return the results of a search, which may have no end; raise InputError for other values."""
    if inspect.iscoroutine(results) or isinstance(results, AsyncIterable):
        if inspect.iscoroutine(results):
            results.close()  # it would warn that nothing awaits it
        raise InputError(
            f"{owner} is asynchronous, expected a call that returns {expected}, best first. Wrap "
            "it in a function that waits, such as lambda query: asyncio.run(search(query))."
        )
    if isinstance(results, str | bytes | Mapping) or not isinstance(results, Iterable):
        raise InputError(
            f"{owner} returned {results!r}, expected {expected}, best first. Return an empty list "
            "if nothing is found."
        )
    return results


def search_hits(retriever: Retriever, query: str, k: int) -> list[Hit]:
    """Return at most k hits with text, best first; raise InputError for what is no hit."""
    owner, expected = f"{type(retriever).__name__}.search()", "a list of Hit"

    def checked(hit: object) -> Hit:
        if not isinstance(hit, Hit):
            raise InputError(
                f"{owner} returned {hit!r} among its results, expected {expected}. A function that "
                "returns (text, score, meta) triples is a retriever, too."
            )
        return hit

    hits = map(checked, _listed(retriever.search(query, k), owner, expected))
    return list(islice((hit for hit in hits if hit.passage.text.strip()), k))


def as_retriever(source: Retriever | SearchFunction) -> Retriever:
    """Return a Retriever unchanged and a search function wrapped, else raise InputError."""
    if not isinstance(source, type):
        if isinstance(source, Retriever) and _accepts(source.search, "query", 1):
            return source
        if callable(source) and (_accepts(source, "query") or _accepts(source, "query", k=1)):
            return FunctionRetriever(source)
    kind = f"the class {source.__name__}" if isinstance(source, type) else type(source).__name__
    raise InputError(
        f"Got {kind} as the retriever, expected an object with search(query, k) or a function from "
        "a string (and a number k, if a parameter has this name) to (text, score, meta) triples."
    )


@dataclass(frozen=True, slots=True)
class Fusion:
    """The constant k and the weights of the dense and the sparse list in a fusion."""

    k: float = 60.0
    dense: float = 1.0
    sparse: float = 1.0


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
    fused = [
        (number, sum(getattr(fusion, name) / (fusion.k + r) for name, r in places.items()), places)
        for number, places in ranks.items()
    ]
    return sorted(fused, key=lambda item: (-item[1], item[0]))
