"""The tasks of `bench.py long`: documents, the parts to read, and tasks over each part.

There are three kinds. Questions come from a set with gold answers if the data has one, else the
same few questions go to every document. Summaries. Quotations: the answer starts with the first
words of a sentence of the document and should continue as the document does.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.data import ITEMS, docqa_documents, gold_questions, long_documents
from ragspec.errors import InputError
from ragspec.retrievers.search.documents import Document

QUESTIONS, SUMMARIES, QUOTATIONS = KINDS = ("questions", "summaries", "quotations")
PROMPTS: Mapping[str, Sequence[str]] = {
    QUESTIONS: (
        "What is this text about?",
        "Who or what is named first, and what happens then?",
        "What is the most important thing that the text says, and why?",
        "Which people or things does the text name, and how do they differ?",
        "How does the text end?",
    ),
    SUMMARIES: (
        "Summarise this text.",
        "Summarise this text in a few sentences for somebody who has not seen it.",
        "Summarise the second half of this text.",
        "List the main points of this text.",
    ),
}
QUOTE = 'Quote, word for word, the passage of the text that begins: "{cue}"'
CUE, CONTINUATION = 10, 60  # words of a cue, and least words of the text after it
SENTENCE = re.compile(r"(?<=[.!?])[”’\"']?\s+(?=[“‘\"A-Z])")
WORDS = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Task:
    """One question over a document.

    Attributes:
        start: First words of the answer, which the prompt holds.
        gold: Right answers.
        evidence: Characters of the document with the answer; None if unknown.
    """

    id: str
    kind: str
    question: str
    start: str = ""
    gold: tuple[str, ...] = ()
    evidence: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DocumentTasks:
    """A part of a document that is read once, and the tasks over it.

    Attributes:
        length: Most tokens to read.
        start: First token to read if the document is long enough.
        kinds: Kinds of tasks to build from the text, `items` of each.
        tasks: Further tasks.
    """

    document: Document
    length: int
    start: int = 0
    kinds: tuple[str, ...] = ()
    items: int = 0
    tasks: tuple[Task, ...] = ()

    def part(self, tokens: int) -> tuple[int, int] | None:
        """Return the range of tokens to read of `tokens` tokens; None for all of them."""
        if tokens <= self.length:
            return None
        start = min(self.start, tokens - self.length)
        return start, start + self.length

    def build_tasks(self, text: str, start: int, seed: int) -> list[Task]:
        """Return the tasks over `text`, which begins at character `start` of the document.

        Questions with evidence outside the text are left out.
        """
        end = start + len(text)
        tasks = [
            task
            for task in self.tasks
            if task.evidence is None or (start <= task.evidence[0] and task.evidence[1] <= end)
        ]
        for kind in self.kinds:
            tasks += list(_build_kind(kind, text, self.items, seed))
        return tasks


def plan_tasks(
    data: Path,
    kinds: Sequence[str],
    lengths: Sequence[int],
    *,
    documents: int,
    items: int,
    questions: int,
    start: int,
) -> list[DocumentTasks]:
    """Return the parts to read and their tasks, the shortest lengths first.

    Args:
        data: Folder of documents.
        kinds: Kinds of tasks.
        lengths: Tokens to read of each document.
        documents: Most long documents.
        items: Tasks of each kind over each part.
        questions: Most questions with gold answers.
        start: First token to read of long documents.

    Raises:
        InputError: A kind is unknown, or the data holds no document.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise InputError(
            f"Expected --kinds of {', '.join(KINDS)}, got {''.join(unknown[:1])!r}. Choose some."
        )
    gold = QUESTIONS in kinds and (data / ITEMS).is_file()
    built_kinds = tuple(kind for kind in kinds if not (gold and kind == QUESTIONS))
    plan = []
    for length in sorted(lengths):
        if gold:
            plan += list(_with_gold(data, length, questions))
        if built_kinds:
            longest = list(long_documents(data).values())[:documents]
            plan += [DocumentTasks(each, length, start, built_kinds, items) for each in longest]
    if not plan:
        raise InputError(f"Expected documents in {data}, got none. Name another folder.")
    return plan


def _with_gold(data: Path, length: int, most: int) -> Iterator[DocumentTasks]:
    """Yield documents with their questions, at most `most` questions in total."""
    documents, all_questions = docqa_documents(data), gold_questions(data)[:most]
    for name in dict.fromkeys(question.document for question in all_questions):
        tasks = tuple(
            Task(q.id, QUESTIONS, q.text, gold=q.answers, evidence=q.evidence)
            for q in all_questions
            if q.document == name
        )
        yield DocumentTasks(documents[name], length, tasks=tasks)


def _build_kind(kind: str, text: str, items: int, seed: int) -> Iterator[Task]:
    if kind == QUOTATIONS:
        for number, cue in enumerate(cues(text, items, seed)):
            yield Task(f"quotation-{number}", kind, QUOTE.format(cue=cue), start=cue)
        return
    for number, question in enumerate(PROMPTS[kind][:items]):
        yield Task(f"{kind}-{number}", kind, question)


def cues(text: str, count: int, seed: int) -> list[str]:
    """Return the first ten words of sentences spread over a text, one of each of `count` parts.

    The text continues for at least sixty words after each.
    """
    starts = [0, *(match.end() for match in SENTENCE.finditer(text))]
    candidates = [cue for start in starts if (cue := _cue(text, start))]
    rng, size = random.Random(seed), len(candidates) / max(1, count)
    parts = [candidates[int(i * size) : int((i + 1) * size)] for i in range(count)]
    return [rng.choice(part) for part in parts if part]


def _cue(text: str, start: int) -> str | None:
    """Return the words after `start` on one line; None if too few words follow."""
    words = []
    for match in WORDS.finditer(text, start):
        words.append(match)
        if len(words) == CUE + CONTINUATION:
            cue = text[start : words[CUE - 1].end()]
            return cue if "\n" not in cue else None
    return None
