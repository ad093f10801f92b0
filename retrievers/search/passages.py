"""Split documents into passages of about a hundred words, between sentences and paragraphs.

A passage is a piece of its document, character for character: `text == document.text[start:end]`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from ragspec.retrievers.search import text as texts
from ragspec.retrievers.search.documents import Document
from ragspec.sampling.settings import checked_count

WORDS = 105
LONG_WORD = 12  # characters; a longer run without spaces counts as several words
WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of document number `document`: characters start to end of its text.

    Attributes:
        title: The nearest heading above the middle of the passage, else the document's title.
    """

    document: int
    start: int
    end: int
    title: str
    text: str


def split_document(document: Document, number: int = 0, words: int = WORDS) -> list[Passage]:
    """Cut one document into passages of about `words` words; raise InputError below 10.

    A passage ends before a sentence that would take it past `words`, and before a heading once it
    is a quarter full. A longer sentence is cut at a line break, else between words.
    """
    words = checked_count(words, "words", 10)
    text, headings = document.text, {offset for offset, _ in document.headings}
    spans, count = list[texts.Span](), words
    for start, end, size in units(text, words):
        if count + size > words or (start in headings and count >= words // 4):
            spans.append((start, end))
            count = size
        else:
            spans[-1] = spans[-1][0], end
            count += size
    titles = [texts.heading_of(document, sum(span) // 2) for span in spans]
    return [
        Passage(number, start, end, title, text[start:end])
        for (start, end), title in zip(spans, titles, strict=True)
    ]


def units(text: str, words: int) -> Iterator[tuple[int, int, int]]:
    """Yield the sentences of a text with their weights, or the parts of those too long."""
    for sentence in texts.sentence_spans(text, 0, len(text)):
        if (size := weight(text, sentence)) <= words:
            yield *sentence, size
            continue
        for line in texts.chunks(text, sentence, texts.LINE_BREAK):
            for run in runs(text, line, words):
                yield *run, weight(text, run)


def weight(text: str, span: texts.Span) -> int:
    """Count words: by length in encoded data, by letters in scripts without spaces."""
    piece = text[span[0] : span[1]]
    letters = 0 if piece.isascii() else len(texts.SPACELESS_LETTER.findall(piece))
    return max(len(piece.split()), len(piece) // LONG_WORD, letters)


def runs(text: str, span: texts.Span, words: int) -> Iterator[texts.Span]:
    """Cut a span into runs of at most `words` words, never within a word of ordinary length."""
    first, last, count, letters = span[0], span[0], 0, 0
    for match in WORD.finditer(text, *span):
        spaceless = not text.isascii() and texts.SPACELESS_LETTER.search(match[0])
        size = words if spaceless else words * LONG_WORD
        for start in range(*match.span(), size):
            end = min(match.end(), start + size)
            count += start == match.start()
            more = len(texts.SPACELESS_LETTER.findall(text, start, end)) if spaceless else 0
            if last > first and max(count, (end - first) // LONG_WORD, letters + more) > words:
                yield first, last
                first, count, letters = start, 1, 0
            last, letters = end, letters + more
    if last > first:
        yield first, last
