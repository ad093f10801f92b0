"""Evaluation data on disk: records, long documents, questions over documents with gold answers.

A folder may hold `longdocs/index.jsonl` of {name, title, file} beside gzipped texts,
`docqa/documents.jsonl.gz` of {doc_id, title, text}, and `docqa/items.jsonl` of {id, split, tier,
doc_id, question, answers, evidence_span}.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document, load_documents

INDEX, ITEMS, TEXTS = "index.jsonl", "docqa/items.jsonl", "docqa/documents.jsonl.gz"
PARAGRAPH_TIER = "pyfaq"  # a tier whose gold answers are whole paragraphs


@dataclass(frozen=True, slots=True)
class GoldQuestion:
    """A question over a document.

    Attributes:
        document: Name of the document.
        answers: Gold answers, of which an answer should hold one.
        evidence: Characters of the document that hold the answer.
    """

    id: str
    document: str
    text: str
    answers: tuple[str, ...]
    evidence: tuple[int, int]


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file of JSON lines, gzipped or not.

    Raises:
        InputError: The file cannot be read.
    """
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line) for line in file if line.strip())
    except (OSError, ValueError) as error:
        kind = "gzipped JSON lines" if path.suffix == ".gz" else "JSON lines"
        raise InputError(f"Expected {kind} in {path}, got {error}. Check --data.") from error


def long_documents(data: Path) -> dict[str, Document]:
    """Return the long documents of a folder by name, else all documents in it.

    Raises:
        InputError: The index cannot be read.
        DocumentError: A document cannot be read.
    """
    folder = data / "longdocs" if (data / "longdocs" / INDEX).is_file() else data
    if not (folder / INDEX).is_file():
        return {document.name: document for document in load_documents(data).documents}
    documents = {}
    for row in read_records(folder / INDEX):
        with gzip.open(folder / row["file"], "rt", encoding="utf-8") as file:
            documents[row["name"]] = Document(
                name=row["name"], title=row["title"], text=file.read()
            )
    return documents


def docqa_documents(data: Path) -> dict[str, Document]:
    """Return the documents of a folder's questions by name."""
    rows = read_records(data / TEXTS)
    return {row["doc_id"]: Document(row["doc_id"], row["title"], row["text"]) for row in rows}


def gold_questions(data: Path, split: str = "valid") -> list[GoldQuestion]:
    """Return the questions of a split whose gold answers are short."""
    return [
        GoldQuestion(
            *(row["id"], row["doc_id"], row["question"]),
            *(tuple(row["answers"]), (row["evidence_span"][0], row["evidence_span"][1])),
        )
        for row in read_records(data / ITEMS)
        if row["split"] == split and row["tier"] != PARAGRAPH_TIER
    ]


def holds(text: str, gold: Iterable[str]) -> bool:
    """Return whether a text holds one of the gold answers, regardless of case and spaces."""
    return any(_normalise(each) in _normalise(text) for each in gold)


def _normalise(text: str) -> str:
    return " ".join(text.lower().split())
