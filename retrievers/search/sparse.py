"""Sparse search: BM25 (in Lucene's form) over words, their first letters, and titles by themselves.

Inflected words of most languages begin alike (McNamee, Nicholas and Mayfield 2009, "Addressing
morphological variation in alphabetic languages"). So a word counts half by its first five letters.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.search.text import LETTERS, words_of

K1, B = 1.2, 0.75  # saturation of repeated words, and by how much the length counts
TITLE = 0.3  # weight of the score that a title has among the titles
FIRST = 5  # letters
PARTS = "data", "indices", "indptr"
WORDS = "words-4.json"  # a higher number with every change of `words_of`
Parts = Mapping[str, NDArray[np.number]]
FILES = (WORDS, *(f"{name}.npy" for name in PARTS))


def largest(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest of scores [P], best first; of equal ones the earlier."""
    k = min(k, len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    best = np.concatenate([above, np.flatnonzero(scores == least)[: k - len(above)]])
    return best[np.lexsort((best, -scores[best]))]


def beginning(word: str) -> str:
    """Return the term for the first letters of a word; short words and others stay."""
    return f"{word[:FIRST]}*" if len(word) >= FIRST and LETTERS.fullmatch(word) else word


class SparseIndex:
    """BM25 scores of every word in every passage, looked up for the words of a query.

    Args:
        numbers: Number of each term: a word, or the beginning of words.
        parts: The scores of term t are data[indptr[t] : indptr[t + 1]], of the passages with the
            `indices` there.
    """

    def __init__(self, numbers: Mapping[str, int], parts: Parts, count: int) -> None:
        self._numbers, self._parts, self._count = numbers, parts, count

    @classmethod
    def build(cls, texts: Sequence[str], titles: Sequence[str] = ()) -> Self:
        """Index the passages' texts, each of which has the words of its title, if there are any."""
        numbers = defaultdict[str, int]()
        numbers.default_factory = numbers.__len__
        terms, passages, scores = _scored(texts, numbers)
        if titles:
            places = {title: place for place, title in enumerate(dict.fromkeys(titles))}
            title_terms, at, title_scores = _scored([*places], numbers)
            known = title_terms * len(places) + at
            keys = terms * len(places) + np.array([places[title] for title in titles])[passages]
            shared = np.isin(keys, known)
            scores[shared] += TITLE * title_scores[np.searchsorted(known, keys[shared])]
        ends = np.searchsorted(terms, np.arange(len(numbers) + 1))
        parts: Parts = {"data": scores, "indices": passages, "indptr": ends}
        return cls(dict(numbers), parts, len(texts))

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return the k best (passage number, score), best first; only those that share a word."""
        scores = self.scores(query)
        return [(int(n), float(scores[n])) for n in largest(scores, k) if scores[n] > 0]

    def scores(self, query: str) -> NDArray[np.float32]:
        """Return the score of every passage."""
        total = np.zeros(self._count, np.float32)
        ends = self._parts["indptr"]
        for term, count in Counter(t for w in words_of(query) for t in (w, beginning(w))).items():
            if (number := self._numbers.get(term)) is not None:
                have = slice(ends[number], ends[number + 1])
                total[self._parts["indices"][have]] += count * self._parts["data"][have]
        return total

    def save(self, folder: Path) -> None:
        """Write arrays and JSON into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, part in self._parts.items():
            np.save(folder / f"{name}.npy", part)
        record = {"count": self._count, "words": self._numbers}
        (folder / WORDS).write_text(json.dumps(record), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read an index that `save` wrote; the caller has checked the files."""
        record = json.loads((folder / WORDS).read_text(encoding="utf-8"))
        parts = {name: np.load(folder / f"{name}.npy", allow_pickle=False) for name in PARTS}
        return cls(record["words"], parts, record["count"])


def _scored(
    texts: Sequence[str], numbers: defaultdict[str, int]
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
    """Return the terms of texts, the places of their texts, and the scores, in ascending order."""
    words = [words_of(text) for text in texts]
    terms = np.fromiter(map(numbers.__getitem__, chain.from_iterable(words)), np.int64)
    lengths = np.array([len(each) for each in words])
    places = np.arange(len(texts)).repeat(lengths)
    begun = np.array([numbers[beginning(word)] for word in [*numbers]], np.int64)[terms]
    more = begun != terms
    terms, places = np.append(terms, begun[more]), np.append(places, places[more])
    keys, counts = np.unique(terms * len(texts) + places, return_counts=True)
    terms, places = np.divmod(keys, len(texts))
    having = np.bincount(terms)[terms]  # texts with the term
    rarity = np.log1p((len(texts) - having + 0.5) / (having + 0.5))
    norms = K1 * (1 - B + B * lengths / max(lengths.mean(), 1))
    scores = rarity * counts / (counts + norms[places])
    return terms, places.astype(np.int32), scores.astype(np.float32)
