"""A kNN language model: a target, and a datastore that says what came next elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.knn.knn_lm import KnnLM as KnnLM

_WHERE = {"KnnLM": "ragspec.pipelines.knn.knn_lm"}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
