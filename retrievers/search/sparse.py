"""Sparse search: BM25 over words (bm25s, Lucene's form of the scores)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.search.text import words_of


def largest(scores: NDArray[Any], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest of scores [P], best first; of equal ones the earlier."""
    k = min(k, len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    best = np.concatenate([above, np.flatnonzero(scores == least)[: k - len(above)]])
    return best[np.lexsort((best, -scores[best]))]


class SparseIndex:
    """BM25 scores of every word in every passage, looked up for the words of a query."""

    def __init__(self, scorer: Any) -> None:
        self._scorer = scorer

    @classmethod
    def build(cls, texts: Sequence[str]) -> SparseIndex:
        """Index the passages' texts."""
        import bm25s

        scorer = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
        # A corpus without one word cannot be indexed; the empty string stands in and matches none.
        words = [words_of(text) or [""] for text in texts]
        scorer.index(words, show_progress=False)
        return cls(scorer)

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return the k best (passage number, score), best first; only those that share a word."""
        words = [word for word in words_of(query) if word in self._scorer.vocab_dict]
        if not words:
            return []
        scores = self._scorer.get_scores(words)
        best = largest(scores, k)
        return [(int(number), float(scores[number])) for number in best if scores[number] > 0]

    def scores(self, query: str, numbers: Sequence[int]) -> list[float]:
        """Return the scores of some passages (ascending numbers), bit for bit those of `search`."""
        chosen = np.asarray(numbers, np.int64)
        total = np.zeros(len(chosen), np.float32)
        parts = self._scorer.scores
        for word in words_of(query):
            number = self._scorer.vocab_dict.get(word)
            if number is None:
                continue
            have = slice(parts["indptr"][number], parts["indptr"][number + 1])
            passages, added = parts["indices"][have], parts["data"][have]
            places = np.minimum(np.searchsorted(passages, chosen), max(len(passages) - 1, 0))
            hits = passages[places] == chosen if len(passages) else np.zeros(len(chosen), bool)
            total[hits] += added[places[hits]]
        return [float(score) for score in total]

    def save(self, folder: Path) -> None:
        """Write plain arrays and JSON into a folder."""
        self._scorer.save(folder, show_progress=False)

    @classmethod
    def load(cls, folder: Path) -> SparseIndex:
        """Read an index that `save` wrote; the caller has checked the files."""
        import bm25s

        return cls(bm25s.BM25.load(folder, load_corpus=False, allow_pickle=False))
