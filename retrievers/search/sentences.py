"""The sentences of passages that answer a question, by a score that depends on them alone.

The score is the share of the question's words in the sentence and its titles, weighted by how rare
a word is in English, plus half the cosine of question and sentence. A word that is not there counts
by its cosine with the most similar one. Other documents and the index's own embedder do not change
the score. So one least score tells whether documents speak of a question, be they one or ten
thousand (benchmarks/RESULTS.md).

Vectors are those of the package wordllama, and of the bundled embedder on machines for which it has
no wheel. Both are poor in other scripts than Latin. For their questions the share of words counts
alone, and words are compared by their first letters, as endings differ.
"""

import math
import re
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, cast

import numpy as np

from ragspec.retrievers.formats.encodings import INVISIBLE
from ragspec.retrievers.search import text as texts
from ragspec.retrievers.search.sparse import beginning

if TYPE_CHECKING:
    from ragspec.retrievers.search.dense import StaticEmbedder
    from ragspec.retrievers.search.fusion import Hit
    from ragspec.retrievers.search.nearest import Floats

MOST = 3  # sentences shown
LEAST_WORDS, MOST_WORDS = 12, 60
LEAST_HEADING = 3  # words of a heading that can answer
MARKS = ".!?" + texts.STOPS
RANK_COST = 0.06  # of the score, for each better passage of the search
COSINE = 0.5  # of a point, for the cosine of question and sentence
LATIN_END = "\u0250"
RARITY, MOST_RARITY = 8.0, 16.0  # of a word of another script, and the most of a Latin word there
JOINED, MOST_JOINED = re.compile(r"\d[,:/-]\d"), 4.0  # a date, whose parts count as well
LEAST_SUM = 0.68  # of share and cosine, in a question that the documents speak of
LEAST_SHARE = 0.37  # of the words of a question of another script
LEAST_SCORE = 1.0  # of such a question: sums and shares are divided by their least values
# What a polite question has before and after it.
REQUEST = r"""hello hi hey good\s(?:morning|afternoon|evening|day) please kindly briefly
(?:can|could|would|will)\syou i(?:['’]d|\swould)\slike\sto\s(?:know|ask) i\s(?:want|need)\sto\sknow
do\syou\sknow tell\sme explain(?:\sto\sme)? let\sme\sknow"""
POLITE = re.compile(
    rf"^[\W_]*+(?:(?:{'|'.join(REQUEST.split())})\b(?!-)[\W_]*+)++(?=\w)"
    r"|(?<![\s,.!])[\s,.!]*+\b(?:please|thanks?(?:\s+you)?(?:\s+(?:very|so)\s+much)?"
    r"(?:\s+in\s+advance)?)[\s.!]*$",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Sentence:
    """A sentence of a passage, or neighbouring short ones.

    Attributes:
        start, end: Its characters in the document.
        score: How well it answers the question; 1 and more if it speaks of it.
    """

    hit: "Hit"
    start: int
    end: int
    score: float

    @property
    def text(self) -> str:
        """The words."""
        return self.hit.document.text[self.start : self.end]

    @property
    def alone(self) -> "Hit":
        """The passage cut to the sentence."""
        passage = replace(self.hit.passage, start=self.start, end=self.end, text=self.text)
        return replace(self.hit, passage=passage)

    @property
    def place(self) -> str:
        """The position in the document, in words for people."""
        return self.hit.document.place(self.start, self.end)

    def to_dict(self) -> dict[str, object]:
        """Return the sentence as JSON types."""
        return {
            "document": self.hit.document.name,
            "copies": list(self.hit.copies),
            "start": self.start,
            "end": self.end,
            "place": self.place,
            "score": self.score,
            "text": self.text,
        }


def rank_sentences(question: str, hits: "Sequence[Hit]", *, ranked: bool = True) -> list[Sentence]:
    """Return the sentences of passages that answer best, best first, copies once.

    Args:
        ranked: The passages come from a search, the best one first.
    """
    places = [(rank, hit, *span) for rank, hit in enumerate(hits) for span in statements(hit)]
    scores = score_spans(question, [place[1:] for place in places])
    cost = RANK_COST * ranked
    first = dict[str, Sentence]()
    for at in sorted(range(len(places)), key=lambda at: places[at][0] * cost - scores[at]):
        sentence = Sentence(*places[at][1:], scores[at])
        first.setdefault(sentence.text, sentence)
    return list(first.values())[:MOST]


def score_spans(question: str, spans: "Sequence[tuple[Hit, int, int]]") -> list[float]:
    """Return how well each part of a document, start to end, answers a question."""
    if not spans:
        return []
    plain = POLITE.sub("", question)
    question = plain if texts.words_of(plain) else question
    words = texts.words_of(question)
    latin = 2 * sum(word < LATIN_END for word in words) >= len(words)
    rarity = {word if latin else beginning(word): _rarity(word, latin) for word in words}
    terms, weights = list(rarity), np.array([*rarity.values()])
    weights /= max(weights.sum(), 1e-9)
    titled_texts = [titled(*span) for span in spans]
    parts = [texts.words_of(text) for text in titled_texts]
    if not latin:
        begun = [set(map(beginning, part)) for part in parts]
        shared = np.array([[term in part for term in terms] for part in begun])
        return list(map(float, shared @ weights / LEAST_SHARE))
    embedder = _judge()
    covered = float(any(map(str.isalnum, question)))  # stop words alone ask for anything
    shares = _likeness(embedder, terms, parts) @ weights if terms else covered
    plain = " ".join((question.lower() if question.isupper() else question).split())
    cosines = embedder.encode(titled_texts) @ embedder.encode([plain])[0]
    return list(map(float, (shares + COSINE * cosines) / LEAST_SUM))


def _rarity(word: str, latin: bool) -> float:
    """Return how rare a word of a question is; the embedder knows none of other scripts."""
    if word >= LATIN_END and not latin:
        return RARITY
    most = MOST_JOINED if JOINED.search(word) else math.inf if latin else MOST_RARITY
    return min(_bundled().rarity(word), most)


def _likeness(
    embedder: "StaticEmbedder", terms: Sequence[str], parts: Sequence[Sequence[str]]
) -> "Floats":
    """Return the cosine of each term with the most similar word of each part [parts, terms]."""
    words = dict.fromkeys(word for part in parts for word in part)
    places = {word: place for place, word in enumerate(words)}
    cosines = embedder.encode(terms) @ embedder.encode(list(words)).T
    for row, term in enumerate(terms):
        if any(map(str.isdigit, term)):  # 1998 has the vector of 1989
            cosines[row] = 0.0
        if term in places:
            cosines[row, places[term]] = 1.0
    return np.stack([cosines[:, [places[w] for w in part]].max(1, initial=0.0) for part in parts])


def titled(hit: "Hit", start: int, end: int) -> str:
    """Return a part of a document below its titles."""
    titles = hit.document.title, texts.heading_of(hit.document, start), hit.passage.title
    return INVISIBLE.sub("", "\n".join((*titles, hit.document.text[start:end])))


def statements(hit: "Hit") -> Iterator[texts.Span]:
    """Yield the sentences of a passage as characters (start, end) of the document.

    Headings with text below them are left out, and long sentences cut at lines. Short ones of one
    paragraph are joined, and a paragraph without a mark at its end, such as a term, with the next.
    """
    text, passage, pages = hit.document.text, hit.passage, hit.document.pages
    parts = pages[bisect(pages, passage.start) : bisect(pages, passage.end)]
    headings = dict.fromkeys(parts, "") | dict(hit.document.headings)
    start = end = words = 0
    for first, last in _spans(text, passage.start, passage.end, headings):
        size = _word_count(text[first:last])
        separate = not headings.keys().isdisjoint(range(end, first + 1)) or (
            text[end - 1] in MARKS and texts.PARAGRAPH_BREAK.search(text, end, first)
        )
        if words and (separate or min(words, 2 * size) >= LEAST_WORDS):
            yield start, end
            words = 0
        if not words:
            start = first
        end, words = last, words + size
    if words:
        yield start, end


def _spans(text: str, start: int, end: int, headings: Mapping[int, str]) -> Iterator[texts.Span]:
    empty = list[texts.Span]()  # a heading without text below it so far
    for first, last in texts.sentence_spans(text, start, end):
        if empty and not headings.keys().isdisjoint(range(empty[0][1], first + 1)):
            yield empty.pop()
        if title := headings.get(first):
            start = _end_of_heading(text, first, end, title)
            if _word_count(title) >= LEAST_HEADING:
                empty = [(first, first + len(text[first:start].rstrip()))]
        first = max(first, start)
        if first < last:
            empty.clear()
            lines = texts.chunks(text, (first, last), texts.LINE_BREAK)
            yield from lines if _word_count(text[first:last]) > MOST_WORDS else [(first, last)]
    yield from empty


def _end_of_heading(text: str, start: int, end: int, title: str) -> int:
    """Return where the text below a heading begins; `start` if the title stands elsewhere.

    A title may have marks around it, a line of them below, and before it the key of a JSON value.
    """
    words = r"\s+".join(map(re.escape, title.split()))
    line = rf"[^\w\n]*(?:\w+: )?{words}[^\w\n]*$(?:\n[=~^\"*+-]{{3,}}[ \t]*$)?\s*"
    match = re.compile(line, re.M).match(text, start, end)
    return match.end() if match else start


def _word_count(text: str) -> int:
    """Return the number of words; two letters of a script without spaces count as one."""
    return max(len(text.split()), len(texts.SPACELESS_LETTER.findall(text)) // 2)


@cache
def _judge() -> "StaticEmbedder":
    """Return the embedder of the scores."""
    from ragspec.retrievers.search.dense import load_wordllama

    return load_wordllama() or _bundled()


@cache
def _bundled() -> "StaticEmbedder":
    from ragspec.retrievers.search.dense import StaticEmbedder, load_embedder

    return cast(StaticEmbedder, load_embedder())
