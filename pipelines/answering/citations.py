"""Citations, and how far the documents support an answer.

Citations are whole sentences of a document that stand word for word in an answer. They are found by
matching, so that the same text has the same citations at every budget. All characters are equal but
for white space and soft hyphens. A part of a sentence is no citation, as it may say something else.
Accepted drafts from the passage decide `matched_by`.

An answer is `supported` if one sentence of the documents speaks both of the question and of what
the answer says in its own words, `quoted` if it has a sentence word for word but no such support,
and `unsupported` otherwise. Supported is no proof: the sentence may mean something else.
"""

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Self

from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import Generation, accepted_of
from ragspec.retrievers.formats.encodings import INVISIBLE
from ragspec.retrievers.search import text as script
from ragspec.retrievers.search.documents import Document
from ragspec.retrievers.search.sentences import LEAST_SCORE, Sentence, score_spans
from ragspec.retrievers.search.text import Span, plain_signs, sentence_spans, words_of
from ragspec.rules.base import Step

LEAST_WORDS = 4  # shorter spans are turns of phrase, not quotations, drafted or not
LETTER = rf"(?:[^\W{script.SPACELESS}]|[{script.INDIC}])"  # of a script with spaces, or a digit
WORD = re.compile(rf"[{script.SPACELESS}]{{2}}|{LETTER}+")
# A place within a word; an apostrophe between letters is part of it.
WITHIN_WORD = re.compile(rf"(?<={LETTER})(?=['’]?{LETTER})|(?<={LETTER}['’])(?={LETTER})")
ENDING = " \n\t.!?\"'”’)」』）" + script.STOPS  # may be missing in a quotation of a sentence
# A list's mark, an option or a term before its text may be missing too.
LABEL = re.compile(r"(?:[-*•–]|\(?\w{1,3}[.)]|\S+(?: \S+){0,3}(?=\n\s|\t| {2}))\s+")

LEAST_SUPPORT = 1.8  # score of a sentence, or of neighbouring ones, that supports an answer
NAME = r"(?<=\w )(?:[AIST]\b|[ai]\b(?!'|\s\W*\w))"  # also a word of grammar, as in vitamin A
NUMBER = re.compile(rf"(?:[<>≤≥]=?)?(?:(?<![\w)])[-±]|\^-)?\d+(?:[.,:/]\d+)*|{NAME}")  # with signs
COMPARISON = re.compile(r"(?<=[<>=≤≥])\s+(?=[-±\d$€£¥₹₩₽₺₴])")
MINUS = re.compile(r"(?<![\d)] )\b(?:minus|минус)\s+(?=[\d$€£¥₹₩₽₺₴])", re.IGNORECASE)
HOUR = re.compile(r"(?<![\d:.])(\d[\d:.]*+)\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
UNIT = re.compile(r"((?:[<>]=?|[≤≥])?(?:(?<![\w)])-)?)([$€£¥₹₩₽₺₴¢%‰])")
_UNITS = "dollar euro pound yen rupee won ruble lira hryvnia cent percent permille"
UNITS = dict(zip("$€£¥₹₩₽₺₴¢%‰", _UNITS.split(), strict=True))
_NEGATIONS = r"""not no(?!\.\s*\d) never none nor neither without cannot non nicht kein\w*
nie(?:mals)? niet geen pas jamais aucun\w* nunca não nem не нет ні никогда inte ikke"""
NEGATION = re.compile(rf"\b(?:{'|'.join(_NEGATIONS.split())})\b|n't\b", re.I)
NUMBER_OF_PASSAGE = re.compile(r"\[\d+\]")
SUFFIX = re.compile(r"(?:ing|ed|es|ly|e)$")


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
        cls, document: Document, characters: Span, answer: Span, passage: int, how: str = "match"
    ) -> Self:
        """Return the citation of characters of a document at those of the answer."""
        place, page = document.place(*characters), document.page_of(characters[0])
        return cls(document.name, *characters, *answer, passage, how, place, page)


class Quote(NamedTuple):
    """Equal characters: of the answer, and of the text of passage `hit`."""

    answer: Span
    hit: int
    passage: Span


def cite(answer: str, prompt: Prompt, steps: Iterable[Step]) -> list[Citation]:
    """Return the citations of an answer, in its order, without overlaps."""
    texts = [hit.passage.text for hit in prompt.hits]
    chars = {span[2]: each for span, each in zip(prompt.spans, prompt.chars, strict=True)}
    origins = (step.tree.origin[node].tolist() for step in steps for node in accepted_of(step))
    # The passage and the first character of every token that a draft copied from one.
    copied = {(hit, chars[hit][at][0]) for hit, at in origins if 0 <= at < len(chars.get(hit, ()))}
    citations = []
    for answered, number, (start, end) in without_overlaps(quotes(answer, texts)):
        hit = prompt.hits[number]
        characters = hit.passage.start + start, hit.passage.start + end
        drafted = any(n == number and start <= at < end for n, at in copied)
        how, number = "draft" if drafted else "match", prompt.first + number
        citations.append(Citation.of(hit.document, characters, answered, number, how))
    return citations


def quotes(answer: str, texts: Sequence[str]) -> Iterator[Quote]:
    """Yield the longest runs of whole sentences that answer and passages share."""
    plain, places = collapsed(answer)
    for hit, text in enumerate(texts):
        other, there = collapsed(text)
        sentences = [[bisect_left(there, at) for at in each] for each in whole_sentences(text)]
        covered: dict[int, int] = {}  # where the last run ends, by its shift to the answer
        for number, (start, least, _) in enumerate(sentences):
            sentence = other[start:least]
            matches = re.finditer(f"(?={re.escape(sentence)})", plain) if sentence in plain else ()
            for at in (match.start() for match in matches):
                shift = at - start
                if start < covered.get(shift, 0) or cuts_word(plain, at):
                    continue
                covered[shift] = end = end_of_run(plain, at, other, start)
                ends = [min(last, end) for _, least, last in sentences[number:] if least <= end]
                if ends:
                    ours, theirs = places[ends[-1] + shift - 1] + 1, there[ends[-1] - 1] + 1
                    yield Quote((places[at], ours), hit, (there[start], theirs))


def end_of_run(plain: str, at: int, other: str, start: int) -> int:
    """Return the end in `other` of what it shares with `plain` from there on, in whole words."""
    end, shift = start, at - start
    while end + shift < len(plain) and end < len(other) and plain[end + shift] == other[end]:
        end += 1
    while end > start and (
        cuts_word(plain, end + shift) or cuts_word(other, end) or other[end - 1] == " "
    ):
        end -= 1
    return end


def collapsed(text: str) -> tuple[str, list[int]]:
    """Return a text with single spaces and no invisible characters, and their places."""
    doubled = re.compile(rf"(?<=\s)\s|{INVISIBLE.pattern}")
    places = [at for at in range(len(text)) if not doubled.match(text, at)]
    return "".join(" " if text[at].isspace() else text[at] for at in places), places


def whole_sentences(text: str) -> Iterator[tuple[int, int, int]]:
    """Yield start, least end and end of the sentences of at least four words.

    A sentence may lack its mark and its label; those with a label come once more without it.
    """
    for first, last in sentence_spans(text, 0, len(text)):
        label = LABEL.match(text, first, last)
        least = first + len(text[first:last].rstrip(ENDING))
        for start in (first, label.end()) if label else (first,):
            if len(WORD.findall(text, start, least)) >= LEAST_WORDS:
                yield start, least, last


def cuts_word(text: str, place: int) -> bool:
    """Return whether a cut before character `place` would split a word ("don't" is one word)."""
    return WITHIN_WORD.match(text, place) is not None


def without_overlaps(quotes: Iterable[Quote]) -> list[Quote]:
    """Return the longest quotations that do not overlap in the answer, in its order."""
    separate: list[Quote] = []
    for quote in sorted(quotes, key=lambda quote: (quote.answer[0] - quote.answer[1], quote)):
        start, end = quote.answer
        if all(end <= each.answer[0] or each.answer[1] <= start for each in separate):
            separate.append(quote)
    return sorted(separate)


class Support(StrEnum):
    """How far the documents support an answer."""

    SUPPORTED = "supported"
    QUOTED = "quoted"
    UNSUPPORTED = "unsupported"


def find_evidence(
    question: str, generation: Generation, prompt: Prompt, sentences: Sequence[Sentence], short: str
) -> tuple[tuple[Citation, ...], Support, Sentence | None]:
    """Return citations, support and supporting sentence of an answer, see `Answer`."""
    text = generation.text
    citations = tuple(cite(text, prompt, generation.steps))
    claim = short or claim_of(text, citations)
    spans = [(prompt.hits[c.passage - prompt.first], c.start, c.end) for c in citations]
    scores = score_spans(question, spans)
    every = [*(Sentence(*span, n) for span, n in zip(spans, scores, strict=True)), *sentences]
    speaking = sorted((s for s in every if s.score >= LEAST_SUPPORT), key=lambda s: -s.score)
    by = next((each for each in speaking if supports(each, claim, question)), None)
    quoted = Support.QUOTED if citations else Support.UNSUPPORTED
    return citations, Support.SUPPORTED if by else quoted, by


def supports(neighbours: Sentence, claim: str, question: str) -> bool:
    """Return whether one of neighbouring sentences speaks of a question and has a claim."""
    hit, text = neighbours.hit, neighbours.hit.document.text
    places = [(hit, *span) for span in sentence_spans(text, neighbours.start, neighbours.end)]
    return any(
        score >= LEAST_SCORE and says(claim, text[start:end], question)
        for (_, start, end), score in zip(places, score_spans(question, places), strict=True)
    )


def claim_of(answer: str, citations: Iterable[Citation]) -> str:
    """Return an answer without its citations."""
    for each in reversed(list(citations)):
        answer = answer[: each.answer_start] + " " + answer[each.answer_end :]
    rest = NUMBER_OF_PASSAGE.sub(" ", answer)
    return rest if words_of(rest) else ""


def says(claim: str, sentence: str, question: str) -> bool:
    """Return whether a sentence has all that a claim adds to a question, in words and numbers."""
    claim, sentence, question = map(with_units, (claim, sentence, question))
    words = set(words_of(claim)) - set(words_of(question))
    same = bool(NEGATION.search(claim)) == bool(NEGATION.search(sentence))
    texts = claim, f"{sentence} {question}"
    numbers, sources = ({number.upper() for number in NUMBER.findall(text)} for text in texts)
    stems = {root(word) for word in words_of(sentence)}
    return bool(words) and same and numbers <= sources and {root(word) for word in words} <= stems


def with_units(text: str) -> str:
    """Return a text with words for the signs of units, and numbers in one spelling."""
    text = COMPARISON.sub("", MINUS.sub("-", plain_signs(text)))
    text = HOUR.sub(r"\1 \1\2m", text)
    return UNIT.sub(lambda unit: f" {UNITS[unit[2]]} {unit[1]}", text)


def root(word: str) -> str:
    """Return a word without an ending, so that "required" is "requires"."""
    return SUFFIX.sub("", word) if len(word) > 4 else word
