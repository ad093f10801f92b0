"""A second look at the hits of a search by a model that reads question and passage together.

Such a cross-encoder (Nogueira and Cho, Passage Re-ranking with BERT, arXiv:1901.04085) is slower
than an index and better, so it orders the first hits of a search only.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ragspec.errors import InputError, ModelError
from ragspec.models.checks import check_reranker
from ragspec.retrievers.search.dense import OPTIONS, load_safely
from ragspec.retrievers.search.fusion import Hit

if TYPE_CHECKING:
    from sentence_transformers import CrossEncoder as Model

RERANKED = 30  # hits that are ordered anew


class Reranker(Protocol):
    """A model that scores texts for a query."""

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Return how well each text answers the query; higher is better."""


class CrossEncoder:
    """A cross-encoder of sentence-transformers, a folder or a hub model, loaded at the first call.

    Raises:
        MissingModelError: The name leads to no model.
        ModelError: Its files are damaged, or of another kind of model.
    """

    def __init__(self, name: str | Path) -> None:
        self._folder = check_reranker(name).folder

    @cached_property
    def model(self) -> "Model":
        """The model of sentence-transformers."""
        from sentence_transformers import CrossEncoder as Model

        return load_safely(partial(Model, str(self._folder), **OPTIONS), self._folder)

    def scores(self, query: str, texts: Sequence[str]) -> Sequence[float]:
        """Return the model's score of each pair."""
        pairs = [(query, text) for text in texts]
        scores = np.asarray(self.model.predict(pairs, show_progress_bar=False))
        if scores.ndim != 1:
            raise ModelError(
                f"{self._folder} gives {scores.shape[-1]} scores for a pair; expected one, as "
                "cross-encoders that are trained for search do. Name such a model."
            )
        return list(map(float, scores))


def rerank(reranker: Reranker, query: str, hits: Sequence[Hit]) -> list[Hit]:
    """Return hits by the reranker's scores, equal ones as before; raise InputError if wrong."""
    scores = np.array(reranker.scores(query, [hit.passage.text for hit in hits]), dtype=float)
    if scores.shape != (len(hits),) or not np.isfinite(scores).all():
        raise InputError(
            f"{type(reranker).__name__} returned {scores} for {len(hits)} texts; expected a number "
            "for each."
        )
    return [replace(hits[at], score=float(scores[at])) for at in np.argsort(-scores, kind="stable")]
