"""Citations: pieces of an answer that stand word for word in a document.

They are found by matching, so that the same text has the same citations at every budget. A citation
is made only where the characters are equal. Accepted drafts from the passage decide `matched_by`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import accepted_of
from ragspec.retrievers.search.fusion import Hit
from ragspec.rules.base import Step

LEAST_WORDS = 4  # shorter spans are turns of phrase, not quotations, drafted or not
WORD = re.compile(r"\w+")
APOSTROPHES = ("'", "’")
NO_BEGINNING = frozenset(" \n\t,;:.!?)]}")  # a quotation does not begin with the end of another


@dataclass(frozen=True, slots=True)
class Citation:
    """answer[answer_start:answer_end] == text of `document`[start:end], in characters.

    Attributes:
        document: The document's name.
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
    page: int | None = None

    @property
    def place(self) -> str:
        """The position in the document, in words for people."""
        where = f"characters {self.start} to {self.end}"
        return where if self.page is None else f"page {self.page}"


@dataclass(frozen=True, slots=True)
class Quote:
    """Equal characters: answer from `answer_start`, text of passage `hit` from `start`."""

    answer_start: int
    hit: int
    start: int
    length: int
    matched_by: str = "match"

    @property
    def answer_end(self) -> int:
        """End of the quotation in the answer."""
        return self.answer_start + self.length

    def overlaps(self, characters: Iterable[tuple[int, int]]) -> bool:
        """Return whether it has one of these characters, each with its passage."""
        ours = range(self.start, self.start + self.length)
        return any(hit == self.hit and at in ours for hit, at in characters)


def cite(
    answer: str, prompt: Prompt, steps: Iterable[Step], short: tuple[int, int] | None = None
) -> list[Citation]:
    """Return the citations of an answer, in its order, without overlaps.

    Args:
        steps: The steps of the generation.
        short: Characters (start, end) of the answer proper. It is cited at any length if a cited
            passage contains it.
    """
    texts = [hit.passage.text for hit in prompt.hits]
    copied = copied_characters(prompt, steps)
    chosen = [
        replace(quote, matched_by="draft") if quote.overlaps(copied) else quote
        for quote in without_overlaps(matched_quotes(answer, texts))
    ]
    if short is not None:
        chosen = without_overlaps([*chosen, *short_quotes(answer, short, texts, chosen)])
    chosen.sort(key=lambda quote: quote.answer_start)
    return [citation(quote, prompt.hits[quote.hit], prompt.first + quote.hit) for quote in chosen]


def citation(quote: Quote, hit: Hit, number: int) -> Citation:
    """Turn a quotation of a passage of this number into one of its document."""
    start = hit.passage.start + quote.start
    return Citation(
        document=hit.document.name,
        start=start,
        end=start + quote.length,
        answer_start=quote.answer_start,
        answer_end=quote.answer_end,
        passage=number,
        matched_by=quote.matched_by,
        page=hit.document.page_of(start),
    )


def copied_characters(prompt: Prompt, steps: Iterable[Step]) -> set[tuple[int, int]]:
    """Return the passage and the first character of every token that a draft copied from one."""
    copied = set[tuple[int, int]]()
    for step in steps:
        for node in accepted_of(step):
            hit, offset = (int(value) for value in step.tree.origin[node])
            if chars := prompt.passage_chars(hit, offset):
                copied.add((hit, chars[0]))
    return copied


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
            quote = grown(answer, texts[hit], Quote(start, hit, place, end - start))
            covered[hit, place - start] = quote.answer_end
            if words_in(answer, quote) >= LEAST_WORDS:
                yield quote


def windows(text: str) -> Iterator[tuple[int, int]]:
    """Yield the characters (start, end) of every four consecutive words."""
    words = [match.span() for match in WORD.finditer(text)]
    for first in range(len(words) - LEAST_WORDS + 1):
        yield words[first][0], words[first + LEAST_WORDS - 1][1]


def short_quotes(
    answer: str, short: tuple[int, int], texts: Sequence[str], chosen: Sequence[Quote]
) -> Iterator[Quote]:
    """Yield the answer proper as a quotation, from the longest quoted passage that contains it."""
    quotation = answer[short[0] : short[1]]
    pattern = re.compile(rf"(?<!\w){re.escape(quotation)}(?!\w)")
    for quote in sorted(chosen, key=lambda quote: -quote.length):
        text = texts[quote.hit]
        match = pattern.search(text, quote.start, quote.start + quote.length)
        match = match or pattern.search(text)
        if match:
            yield Quote(short[0], quote.hit, match.start(), len(quotation))
            return


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
    return Quote(a, quote.hit, a + shift, b - a)


def cuts_word(text: str, place: int) -> bool:
    """Return whether a cut before character `place` would split a word ("don't" is one word)."""
    if not 0 < place < len(text):
        return False
    left, before, after, right = (text[i : i + 1] for i in range(place - 2, place + 2))
    if before in APOSTROPHES:
        return place > 1 and is_letter(left) and is_letter(after)
    if after in APOSTROPHES:
        return is_letter(before) and is_letter(right)
    return is_letter(before) and is_letter(after)


def is_letter(character: str) -> bool:
    """Return whether a character is part of a word."""
    return WORD.fullmatch(character) is not None


def words_in(answer: str, quote: Quote) -> int:
    """Count the words of a quotation."""
    return len(WORD.findall(answer, quote.answer_start, quote.answer_end))


def without_overlaps(quotes: Iterable[Quote]) -> list[Quote]:
    """Return the longest quotations that do not overlap in the answer."""
    separate: list[Quote] = []
    for quote in sorted(quotes, key=lambda q: (-q.length, q.answer_start, q.hit, q.start)):
        clear = (
            quote.answer_end <= k.answer_start or k.answer_end <= quote.answer_start
            for k in separate
        )
        if quote.length and all(clear):
            separate.append(quote)
    return separate
