"""Small corpora for the tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.indexes.segment import Segment

VOCAB = 97


def rows(n: int, length: int = 12, seed: int = 0) -> list[list[int]]:
    return [row.tolist() for row in np.random.default_rng(seed).integers(0, 90, (n, length))]


def build(path: Path, documents: Sequence[Any] = (), **options: Any) -> CorpusIndex:
    return CorpusIndex.build(documents, VOCAB, path, **options)


def reopen(path: Path, **options: Any) -> CorpusIndex:
    return CorpusIndex.open(path, **options)


def held(segments: Sequence[Segment]) -> list[list[int]]:
    return [document.tolist() for segment in segments for document in segment.documents()]


def text_of(store: CorpusIndex, scope: str = "global") -> list[list[int]]:
    return held(store.segments(scope))
