"""Documents of hosts as passages of ours, and the other way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.fusion import FunctionRetriever, Hit, SearchMode
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.passages import Passage

ProgressCallback = tuple[
    str, float, Mapping[str, Any]
]  # text, score and what else is known of a document


def hits_of(documents: Iterable[ProgressCallback]) -> tuple[Hit, ...]:
    """Return documents of a host as hits, in their order; those without text are left out.

    Of what else is known "source", "name" and "title" count, and "start" and "end", characters of
    the whole document, where they suit the text. Raises InputError for what is no such triple.
    """
    results = [each for each in documents if not isinstance(each[0], str) or each[0].strip()]
    hits = FunctionRetriever(lambda query: results).search("", len(results))
    return tuple(_moved(hit, meta) for hit, (_, _, meta) in zip(hits, results, strict=True))


def _moved(hit: Hit, meta: Mapping[str, Any]) -> Hit:
    """Return a hit that stands where its metadata says."""
    start, end = meta.get("start"), meta.get("end")
    if not isinstance(start, int) or not isinstance(end, int) or start < 0:
        return hit
    if end - start != len(hit.passage.text):
        return hit
    return replace(hit, passage=replace(hit.passage, start=start, end=end))


class HostRetriever:
    """A host's retriever as one of ours, such as `DocQA` asks for.

    find: returns at most so many documents for a question, best first.
    """

    def __init__(self, find: Callable[[str, int], Iterable[ProgressCallback]]) -> None:
        self._find = find

    def search(self, query: str, k: int) -> list[Hit]:
        """Return at most k hits, best first."""
        return list(hits_of(self._find(query, k))[:k])


def facts_of(hit: Hit) -> dict[str, Any]:
    """Return what is known of a passage, as the metadata of a host's document."""
    document: Document = hit.document
    passage: Passage = hit.passage
    facts = {
        "source": document.path or document.name,
        "name": document.name,
        "title": passage.title,
        "start": passage.start,
        "end": passage.end,
        "score": float(hit.score),
    }
    page = document.page_of(passage.start)
    return facts if page is None else {**facts, "page": page}


def opened(index: PassageIndex | str | os.PathLike[str]) -> PassageIndex:
    """Return an index, opened where its folder is named; raises InputError and `open`'s errors."""
    if isinstance(index, PassageIndex):
        return index
    if isinstance(index, str | os.PathLike):
        return PassageIndex.open(Path(index))
    raise InputError(
        f"got {type(index).__name__} as an index; expected a PassageIndex, or the folder that "
        "its save() wrote."
    )


def search_of(k: Any, mode: Any) -> tuple[int, SearchMode | None]:
    """Return how an index is searched; raises InputError for k < 1 and unknown modes."""
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise InputError(f"got {k!r} as the number of passages; expected a whole number from 1.")
    try:
        return k, None if mode is None else SearchMode(mode)
    except ValueError as error:
        known = ", ".join(SearchMode)
        raise InputError(f"got the search mode {mode!r}; expected one of {known}.") from error
