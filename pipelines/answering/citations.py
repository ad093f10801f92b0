"""Citations: whole sentences of a document that stand word for word in an answer.

They are found by matching, so that the same text has the same citations at every budget. All
characters are equal but for white space. A part of a sentence is no citation, as it may say
something else. Accepted drafts from the passage decide `matched_by`.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import accepted_of
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.text import Span, sentence_spans
from ragspec.rules.base import Step

LEAST_WORDS = 4  # shorter spans are turns of phrase, not quotations, drafted or not
WORD = re.compile(r"\w+")
# A place within a word; an apostrophe between letters is part of it.
WITHIN_WORD = re.compile(r"(?<=\w)(?=['’]?\w)|(?<=\w['’])(?=\w)")
NO_BEGINNING = frozenset(" \n\t,;:.!?)]}")  # a quotation does not begin with the end of another
ENDING = " \n\t.!?。！？।\"'”’)"  # may be missing in a quotation of a sentence
# A list's mark, an option or a term before its text may be missing too.
LABEL = re.compile(r"(?:[-*•–]|\(?\w{1,3}[.)]|\S+(?: \S+){0,3}(?=\n\s|\t| {2}))\s+")


@dataclass(frozen=True, slots=True)
class Citation:
    """answer[answer_start:answer_end] is the text of `document`[start:end], in characters.

    Attributes:
        place: The position in the document, in words for people.
        page: Its page, from 1; None if it has none.
        matched_by: "draft" (accepted drafts copied it from the passage) or "match" (equal text).
        passage: Number of the passage in the prompt, from 1.
    """

    document: str
    start: int
    end: int
    answer_start: int
    answer_end: int
    passage: int
    matched_by: str
    place: str
    page: int | None = None

    @classmethod
    def of(
        cls,
        document: Document,
        characters: Span,
        answer: Span,
        passage: int,
        matched_by: str = "match",
    ) -> Self:
        """Return the citation of characters of a document at those of the answer."""
        place, page = document.place(*characters), document.page_of(characters[0])
        return cls(document.name, *characters, *answer, passage, matched_by, place, page)


@dataclass(frozen=True, slots=True)
class Quote:
    """Equal characters: answer[answer_start:answer_end], and text of passage `hit`[start:end]."""

    answer_start: int
    answer_end: int
    hit: int
    start: int
    end: int

    def overlaps(self, characters: Iterable[tuple[int, int]]) -> bool:
        """Return whether it has one of these characters, each with its passage."""
        return any(hit == self.hit and self.start <= at < self.end for hit, at in characters)


def cite(answer: str, prompt: Prompt, steps: Iterable[Step]) -> list[Citation]:
    """Return the citations of an answer, in its order, without overlaps."""
    texts = [hit.passage.text for hit in prompt.hits]
    copied = copied_characters(prompt, steps)
    citations = []
    for quote in sorted(without_overlaps(quotes(answer, texts)), key=lambda q: q.answer_start):
        hit = prompt.hits[quote.hit]
        characters = hit.passage.start + quote.start, hit.passage.start + quote.end
        answered, number = (quote.answer_start, quote.answer_end), prompt.first + quote.hit
        how = "draft" if quote.overlaps(copied) else "match"
        citations.append(Citation.of(hit.document, characters, answered, number, how))
    return citations


def copied_characters(prompt: Prompt, steps: Iterable[Step]) -> set[tuple[int, int]]:
    """Return the passage and the first character of every token that a draft copied from one."""
    chars = {span[2]: each for span, each in zip(prompt.spans, prompt.chars, strict=True)}
    origins = (step.tree.origin[node].tolist() for step in steps for node in accepted_of(step))
    return {
        (hit, chars[hit][token][0])
        for hit, token in origins
        if 0 <= token < len(chars.get(hit, ()))
    }


def quotes(answer: str, texts: Sequence[str]) -> Iterator[Quote]:
    """Yield the longest runs of whole sentences that answer and passages share."""
    plain, places = collapsed(answer)
    others = [collapsed(text) for text in texts]
    for quote in matched_quotes(plain, [text for text, _ in others]):
        text, there = texts[quote.hit], others[quote.hit][1]
        start, end = whole_sentences(text, there[quote.start], there[quote.end - 1] + 1)
        if start < end:
            shift = quote.answer_start - quote.start
            first, last = (bisect_left(there, at) + shift for at in (start, end - 1))
            yield Quote(places[first], places[last] + 1, quote.hit, start, end)


def collapsed(text: str) -> tuple[str, list[int]]:
    """Return a text with one space for each run of white space, and where its characters were."""
    places = [
        at
        for at, letter in enumerate(text)
        if not (letter.isspace() and at and text[at - 1].isspace())
    ]
    return "".join(" " if text[at].isspace() else text[at] for at in places), places


def whole_sentences(text: str, start: int, end: int) -> Span:
    """Return what text[start:end] has from its first whole sentence to its last.

    A sentence may lack its mark and its label. The span is empty if there is none.
    """
    spans = list[Span]()
    for first, last in sentence_spans(text, 0, len(text)):
        label = LABEL.match(text, first, last)
        least = first + len(text[first:last].rstrip(ENDING))
        begin = label.end() if label and label.end() < least and first < start else first
        if start <= begin and least <= end and len(WORD.findall(text, begin, least)) >= LEAST_WORDS:
            spans.append((begin, min(last, end)))
    return (spans[0][0], spans[-1][1]) if spans else (start, start)


def matched_quotes(answer: str, texts: Sequence[str]) -> Iterator[Quote]:
    """Yield the longest pieces of at least four words that answer and passages share."""
    places: dict[str, list[tuple[int, int]]] = {}
    for hit, text in enumerate(texts):
        for start, end in windows(text):
            places.setdefault(text[start:end], []).append((hit, start))
    covered: dict[tuple[int, int], int] = {}
    for start, end in windows(answer):
        for hit, place in places.get(answer[start:end], ()):
            # The window lies in a quotation of the same alignment that was found before.
            if start < covered.get((hit, place - start), 0):
                continue
            window = Quote(start, end, hit, place, place + end - start)
            quote = grown(answer, texts[hit], window)
            covered[hit, place - start] = quote.answer_end
            if len(WORD.findall(answer, quote.answer_start, quote.answer_end)) >= LEAST_WORDS:
                yield quote


def windows(text: str) -> Iterator[tuple[int, int]]:
    """Yield the characters (start, end) of every four consecutive words."""
    words = [match.span() for match in WORD.finditer(text)]
    for first in range(len(words) - LEAST_WORDS + 1):
        yield words[first][0], words[first + LEAST_WORDS - 1][1]


def grown(answer: str, text: str, quote: Quote) -> Quote:
    """Extend a quotation while both texts agree, then cut it back to whole words."""
    a, b = quote.answer_start, quote.answer_end
    shift = quote.start - a
    while a > 0 and a + shift > 0 and answer[a - 1] == text[a + shift - 1]:
        a -= 1
    while b < len(answer) and b + shift < len(text) and answer[b] == text[b + shift]:
        b += 1
    while a < b and (
        cuts_word(answer, a) or cuts_word(text, a + shift) or answer[a] in NO_BEGINNING
    ):
        a += 1
    while a < b and (cuts_word(answer, b) or cuts_word(text, b + shift) or answer[b - 1].isspace()):
        b -= 1
    return Quote(a, b, quote.hit, a + shift, b + shift)


def cuts_word(text: str, place: int) -> bool:
    """Return whether a cut before character `place` would split a word ("don't" is one word)."""
    return WITHIN_WORD.match(text, place) is not None


def without_overlaps(quotes: Iterable[Quote]) -> list[Quote]:
    """Return the longest quotations that do not overlap in the answer."""
    separate: list[Quote] = []
    by_length = sorted(
        quotes, key=lambda q: (q.answer_start - q.answer_end, q.answer_start, q.hit, q.start)
    )
    for quote in by_length:
        clear = (
            quote.answer_end <= k.answer_start or k.answer_end <= quote.answer_start
            for k in separate
        )
        if all(clear):
            separate.append(quote)
    return separate
