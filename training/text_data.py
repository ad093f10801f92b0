"""Reading of the training text: permissive records only, cut into sentences and passages."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARE_ALIKE = "CC-BY-SA"
SENTENCE_END = re.compile(
    r"(?<!Fig)(?<!Mr)(?<!Dr)(?<!Mrs)(?<!\b[A-Z])[.!?][\"”’)\]]*(?P<gap>\s+)(?=[\"“‘(]?[A-Z0-9])"
)
QA_RECORD = re.compile(
    r"^Context:\n(?P<context>.*)\n\nQuestion: (?P<question>[^\n]*)\n"
    r"Evidence: \[(?P<gold>\d)\] (?P<evidence>[^\n]*)\nAnswer: (?P<answer>[^\n]*)\s*$",
    re.S,
)

QA_BLOCK = re.compile(r"\n\n(?=\[\d\] )")


@dataclass(frozen=True)
class Document:
    """One permissive text: `title`, `kind` (docs, article, book, play, pyfaq) and `text`."""

    title: str
    kind: str
    text: str


@dataclass(frozen=True)
class GoldQuestion:
    """One human question with its passage (title, text), its evidence sentence and its answer."""

    title: str
    passage: str
    question: str
    evidence: str
    answer: str


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file, gzipped or not."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as stream:
        for line in stream:
            yield json.loads(line)


def read_permissive(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records that may go into shipped weights: those of no share-alike licence."""
    for record in read_jsonl(path):
        if SHARE_ALIKE not in record.get("license", ""):
            yield record


def read_documents(shared: Path, split: str = "train") -> list[Document]:
    """Read the permissive plain texts and pyfaq records of `lm/<split>.jsonl.gz`."""
    documents = []
    for record in read_permissive(shared / "data" / "lm" / f"{split}.jsonl.gz"):
        kind = record["kind"]
        if kind == "qa":
            # Records about articles carry share-alike passages as distractors: see read_questions.
            if not record["doc"].startswith("pyfaq"):
                continue
            kind = "pyfaq"
        documents.append(Document(title_of(record), kind, record["text"]))
    return documents


def read_questions(shared: Path, split: str = "train") -> list[GoldQuestion]:
    """Read the human questions about permissive articles, each with its gold passage alone."""
    questions = []
    for record in read_permissive(shared / "data" / "lm" / f"{split}.jsonl.gz"):
        match = QA_RECORD.match(record["text"]) if record["kind"] == "qa" else None
        if match is None:
            continue
        blocks = QA_BLOCK.split(match["context"])
        title, _, passage = blocks[int(match["gold"]) - 1].partition("\n")
        answer = match["answer"].strip()
        question = GoldQuestion(title[4:], passage, match["question"], match["evidence"], answer)
        questions.append(question)
    return questions


def title_of(record: dict[str, Any]) -> str:
    """Give a record's title: its first heading or line, else the last part of its name."""
    first = str(record["text"]).lstrip().split("\n", 1)[0].lstrip("# ").strip()
    if 2 < len(first) < 220:
        return first
    return str(record["doc"]).rsplit("/", 1)[-1].replace("-", " ").replace("_", " ")


def sentence_spans(text: str) -> list[tuple[int, int]]:
    """Cut a text into sentences, as (start, end) character offsets; a line break ends one too."""
    spans: list[tuple[int, int]] = []
    for line in re.finditer(r"[^\n]+", text):
        start = line.start()
        for gap in SENTENCE_END.finditer(text, line.start(), line.end()):
            spans.append((start, gap.start("gap")))
            start = gap.end()
        spans.append((start, line.end()))
    return [span for span in spans if text[slice(*span)].strip()]
