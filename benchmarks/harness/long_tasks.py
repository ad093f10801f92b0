"""What `ragspec bench long` asks: documents, the parts of them that are read, and tasks over each.

Three kinds. Questions: of a set with gold answers where the data has one, else the same few over
every document. Summaries. Quotations: the answer is begun with the words that begin a sentence of
the document, and is to go on as the document does.
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
REQUESTS: Mapping[str, Sequence[str]] = {
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
CUE, GOES_ON = 10, 60  # words that are given, and that the text has after them at least
SENTENCE = re.compile(r"(?<=[.!?])[”’\"']?\s+(?=[“‘\"A-Z])")
WORDS = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Task:
    """One question over a document. begun: what its answer begins with; gold: right answers."""

    id: str
    kind: str
    question: str
    begun: str = ""
    gold: tuple[str, ...] = ()
    evidence: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class PrefillJob:
    """A part of a document that is read once, and what is asked over it.

    length: its tokens at most. start: the first one, where the document is long enough.
    kinds: those of tasks that are made from its text, `items` of each. tasks: those that are given.
    """

    document: Document
    length: int
    start: int = 0
    kinds: tuple[str, ...] = ()
    items: int = 0
    tasks: tuple[Task, ...] = ()

    def part(self, tokens: int) -> tuple[int, int] | None:
        """Return which tokens to read of a document of so many; None for all of them."""
        if tokens <= self.length:
            return None
        start = min(self.start, tokens - self.length)
        return start, start + self.length

    def latents_to_draw(self, text: str, start: int, seed: int) -> list[Task]:
        """Return the tasks over the text that was read, which begins at a character.

        Questions whose evidence lies outside it are left out.
        """
        end = start + len(text)
        results = [
            task
            for task in self.tasks
            if task.evidence is None or (start <= task.evidence[0] and task.evidence[1] <= end)
        ]
        for kind in self.kinds:
            results += list(_create(kind, text, self.items, seed))
        return results


def readings(
    data: Path,
    kinds: Sequence[str],
    lengths: Sequence[int],
    *,
    documents: int,
    items: int,
    questions: int,
    start: int,
) -> list[PrefillJob]:
    """Return what to read, and what to ask over it; the shortest lengths first.

    documents: long ones, at most. items: tasks of each kind over each reading of them. questions:
    in all, of the set with gold answers. start: the first token of long documents that is read.
    Raises InputError for a kind that there is not, or data without any.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise InputError(f"unknown kind {''.join(unknown[:1])!r}. Known: {', '.join(KINDS)}.")
    gold = QUESTIONS in kinds and (data / ITEMS).is_file()
    instance = tuple(kind for kind in kinds if not (gold and kind == QUESTIONS))
    results = []
    for length in sorted(lengths):
        if gold:
            results += list(_with_gold(data, length, questions))
        if instance:
            longest = list(long_documents(data).values())[:documents]
            results += [PrefillJob(each, length, start, instance, items) for each in longest]
    if not results:
        raise InputError(f"{data} holds no documents; expected some to ask about.")
    return results


def _with_gold(data: Path, length: int, most: int) -> Iterator[PrefillJob]:
    """Yield documents with their own questions, at most so many questions in all."""
    documents, request = docqa_documents(data), gold_questions(data)[:most]
    for name in dict.fromkeys(question.document for question in request):
        tasks = tuple(
            Task(q.id, QUESTIONS, q.text, gold=q.answers, evidence=q.evidence)
            for q in request
            if q.document == name
        )
        yield PrefillJob(documents[name], length, tasks=tasks)


def _create(kind: str, text: str, items: int, seed: int) -> Iterator[Task]:
    if kind == QUOTATIONS:
        for number, cue in enumerate(cues(text, items, seed)):
            yield Task(f"quotation-{number}", kind, QUOTE.format(cue=cue), begun=cue)
        return
    for number, question in enumerate(REQUESTS[kind][:items]):
        yield Task(f"{kind}-{number}", kind, question)


def cues(text: str, count: int, seed: int) -> list[str]:
    """Return the beginnings of sentences spread over a text, one out of each of `count` parts.

    Each has ten words, and the text goes on for sixty more.
    """
    starts = [0, *(match.end() for match in SENTENCE.finditer(text))]
    fit = [cue for start in starts if (cue := _cue(text, start))]
    dice, size = random.Random(seed), len(fit) / max(1, count)
    parts = [fit[int(i * size) : int((i + 1) * size)] for i in range(count)]
    return [dice.choice(part) for part in parts if part]


def _cue(text: str, start: int) -> str | None:
    """Return the words from a place on, on one line; None where too few follow."""
    words = []
    for match in WORDS.finditer(text, start):
        words.append(match)
        if len(words) == CUE + GOES_ON:
            cue = text[start : words[CUE - 1].end()]
            return cue if "\n" not in cue else None
    return None
