"""Passages cut from documents: round a place, anywhere, or as a retriever would find them."""

from __future__ import annotations

import math
import random
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from text_data import Document, sentence_spans
from text_questions import clean, is_content


@dataclass(frozen=True)
class Passage:
    """A cut of a document: its title, its text and the sentences in it."""

    title: str
    text: str
    sentences: tuple[str, ...]


@dataclass(frozen=True)
class Requests:
    """A question about a passage with its evidence sentence and its answer."""

    passage: Passage
    question: str
    evidence: str
    answer: str


def terms(text: str) -> list[str]:
    """Split a text into lower-case words for BM25."""
    return re.findall(r"\w+", text.lower())


def rank(question: str, passages: Sequence[str], k1: float = 1.2, b: float = 0.75) -> list[int]:
    """Order passages by their BM25 score for the question (Robertson and Zaragoza 2009)."""
    counts = [Counter(terms(passage)) for passage in passages]
    sizes = [sum(count.values()) for count in counts]
    mean = sum(sizes) / len(sizes)
    scores = [0.0] * len(passages)
    for term in set(terms(question)):
        holders = sum(1 for count in counts if term in count)
        weight = math.log(1 + (len(passages) - holders + 0.5) / (holders + 0.5))
        for i, count in enumerate(counts):
            norm = k1 * (1 - b + b * sizes[i] / mean)
            scores[i] += weight * count[term] * (k1 + 1) / (count[term] + norm)
    return sorted(range(len(passages)), key=lambda i: -scores[i])


class Cutter:
    """Cuts passages from prose documents, larger and more factual ones more often."""

    def __init__(self, documents: list[Document]) -> None:
        """Keep the prose of `documents`."""
        self.documents = [d for d in documents if d.kind in ("docs", "article", "book")]
        # Articles are the kind of text that people ask facts about: draw them more often.
        factor = {"docs": 1.0, "article": 4.0, "book": 0.5}
        self.sizes = [factor[d.kind] * min(len(d.text), 60_000) for d in self.documents]
        self._spans: dict[int, list[tuple[int, int]]] = {}

    def draw(self, rng: random.Random) -> Document:
        """Draw a document."""
        return rng.choices(self.documents, self.sizes)[0]

    def anywhere(self, document: Document, words: int, rng: random.Random) -> Passage:
        """Cut a passage from anywhere in a document."""
        return self.window(document, rng.randrange(len(self.spans(document))), words)

    def spans(self, document: Document) -> list[tuple[int, int]]:
        """Give the sentence offsets of a document, computed once."""
        key = id(document)
        if key not in self._spans:
            self._spans[key] = sentence_spans(document.text)
        return self._spans[key]

    def window_at(self, document: Document, place: int, words: int, rng: random.Random) -> Passage:
        """Cut a passage that holds the character `place`, at a random distance from its start."""
        spans = self.spans(document)
        hit = max(i for i, (start, _) in enumerate(spans) if start <= place)
        first, count = hit, 0
        back = rng.random() * words * 0.8
        while first > 0:
            count += len(document.text[slice(*spans[first - 1])].split())
            if count > back:
                break
            first -= 1
        passage = self.window(document, first, words)
        return (
            passage
            if spans[hit][0] < spans[first][0] + len(passage.text)
            else self.window(document, hit, words)
        )

    def window(self, document: Document, first: int, words: int) -> Passage:
        """Cut a passage of about `words` words from sentence `first` on."""
        spans = self.spans(document)
        stop = first
        total = 0
        while stop < len(spans) and total < words:
            total += len(document.text[slice(*spans[stop])].split())
            stop += 1
        sentences = tuple(document.text[a:b].strip() for a, b in spans[first:stop])
        text = document.text[spans[first][0] : spans[stop - 1][1]]
        return Passage(document.title, text[: words * 14], sentences)

    def cuts(self, document: Document, words: int, rng: random.Random) -> list[Passage]:
        """Cut a document into passages of about `words` words, from one of its first lines on."""
        spans = self.spans(document)
        first = rng.randrange(min(8, len(spans)))
        passages = []
        while first < len(spans):
            passages.append(self.window(document, first, words))
            first += len(passages[-1].sentences)
        return passages

    def distractors(
        self,
        request: Requests,
        document: Document,
        count: int,
        words: int,
        hardness: float,
        rng: random.Random,
    ) -> list[Passage]:
        """Cut other passages; hard ones share words with the question, as a retriever's would."""
        hard = rng.random() < 0.7 * hardness
        selection = {clean(word).lower() for word in request.question.split() if is_content(word)}
        candidates: list[tuple[float, int, Passage]] = []
        for number in range(count * (5 if hard else 1)):
            if rng.random() < 0.2:
                document = self.draw(rng)
            passage = self.anywhere(document, words, rng)
            if request.evidence in passage.text or passage.text[:80] in request.passage.text:
                continue
            present = {clean(word).lower() for word in passage.text.split()}
            candidates.append((-len(selection & present) if hard else 0.0, number, passage))
        return [passage for _, _, passage in sorted(candidates, key=lambda c: c[:2])[:count]]
