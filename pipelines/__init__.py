"""Sentences a user would say: ask your documents.

Importing this package is light: the public names are imported when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ragspec.registry import door

if TYPE_CHECKING:
    from ragspec.pipelines.docqa.citations import Citation as Citation
    from ragspec.pipelines.docqa.docqa import Answer as Answer
    from ragspec.pipelines.docqa.docqa import DocQA as DocQA
    from ragspec.pipelines.docqa.prompt import Prompt as Prompt
    from ragspec.pipelines.docqa.prompt import build_prompt as build_prompt
    from ragspec.pipelines.iterative.rag import IterativeRag as IterativeRag
    from ragspec.pipelines.knn.knn_lm import KnnLM as KnnLM
    from ragspec.pipelines.long.document import LongDocument as LongDocument

_WHERE = {
    "Answer": "ragspec.pipelines.docqa.docqa",
    "Citation": "ragspec.pipelines.docqa.citations",
    "DocQA": "ragspec.pipelines.docqa.docqa",
    "IterativeRag": "ragspec.pipelines.iterative.rag",
    "KnnLM": "ragspec.pipelines.knn.knn_lm",
    "LongDocument": "ragspec.pipelines.long.document",
    "Prompt": "ragspec.pipelines.docqa.prompt",
    "build_prompt": "ragspec.pipelines.docqa.prompt",
}

__all__ = sorted(_WHERE)

if not TYPE_CHECKING:  # hidden from the checkers, which otherwise accept misspelt names
    __getattr__, __dir__ = door(__name__, _WHERE)
