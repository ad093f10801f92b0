"""Sparse search: BM25 over words (bm25s, Lucene's form of the scores)."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ragspec.retrievers.search.text import words_of

PARTS = "data", "indices", "indptr"
WORDS = "words.json"
FILES = (WORDS, *(f"{name}.npy" for name in PARTS))


def largest(scores: NDArray[np.floating], k: int) -> NDArray[np.int64]:
    """Return the indices of the k largest of scores [P], best first; of equal ones the earlier."""
    k = min(k, len(scores))
    least = np.partition(scores, len(scores) - k)[len(scores) - k]
    above = np.flatnonzero(scores > least)
    best = np.concatenate([above, np.flatnonzero(scores == least)[: k - len(above)]])
    return best[np.lexsort((best, -scores[best]))]


class SparseIndex:
    """BM25 scores of every word in every passage, looked up for the words of a query.

    bm25s computes them; looking them up needs NumPy alone, which loads a second faster.

    Args:
        numbers: Number of each word.
        parts: The scores of word w are data[indptr[w] : indptr[w + 1]], of the passages with the
            `indices` there.
        count: Number of passages.
    """

    def __init__(
        self, numbers: Mapping[str, int], parts: Mapping[str, NDArray[Any]], count: int
    ) -> None:
        self._numbers, self._parts, self._count = numbers, parts, count

    @classmethod
    def build(cls, texts: Sequence[str]) -> Self:
        """Index the passages' texts."""
        import bm25s

        logging.getLogger("bm25s").setLevel(logging.WARNING)  # its import lets it log all
        scorer = bm25s.BM25(k1=1.2, b=0.75, method="lucene")
        # A corpus without one word cannot be indexed; the empty string stands in and matches none.
        words = [words_of(text) or [""] for text in texts]
        scorer.index(words, show_progress=False)
        parts = {name: np.asarray(scorer.scores[name]) for name in PARTS}
        return cls(scorer.vocab_dict, parts, len(texts))

    def search(self, query: str, k: int) -> list[tuple[int, float]]:
        """Return the k best (passage number, score), best first; only those that share a word."""
        scores = self.scores(query)
        best = largest(scores, k)
        return [(int(number), float(scores[number])) for number in best if scores[number] > 0]

    def scores(self, query: str) -> NDArray[np.float32]:
        """Return the score of every passage."""
        total = np.zeros(self._count, np.float32)
        ends = self._parts["indptr"]
        for number in (self._numbers[word] for word in words_of(query) if word in self._numbers):
            have = slice(ends[number], ends[number + 1])
            total[self._parts["indices"][have]] += self._parts["data"][have]
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
