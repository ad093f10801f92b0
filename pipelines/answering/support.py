"""How far the documents support an answer, in one word.

An answer is `supported` if one sentence of the documents speaks both of the question and of what
the answer says in its own words, `quoted` if it has a sentence word for word but no such support,
and `unsupported` otherwise. Supported is no proof: the sentence may mean something else.
"""

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

from ragspec.pipelines.answering.citations import Citation, cite
from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import Generation
from ragspec.retrievers.search.sentences import LEAST_SCORE, Sentence, score_spans
from ragspec.retrievers.search.text import sentence_spans, words_of

LEAST_SUPPORT = 1.8  # score of a sentence, or of neighbouring ones, that supports an answer
NUMBER = re.compile(r"\d+(?:[.,:/]\d+)*")
NEGATION = re.compile(r"\b(?:not|no|never|none|nor|neither|without|cannot)\b|n['’]t\b", re.I)
ENDING = re.compile(r"(?:ing|ed|es|ly|e)$")
NUMBER_OF_PASSAGE = re.compile(r"\[\d+\]")


class Support(StrEnum):
    """How far the documents support an answer."""

    SUPPORTED = "supported"
    QUOTED = "quoted"
    UNSUPPORTED = "unsupported"


class Evidence(NamedTuple):
    """What the documents have for an answer, see `Answer`."""

    citations: tuple[Citation, ...]
    support: Support
    supporting: Sentence | None


def find_evidence(
    question: str,
    generation: Generation,
    prompt: Prompt,
    sentences: tuple[Sentence, ...],
    short: str = "",
) -> Evidence:
    """Return the citations and the support of an answer; `short` is the answer proper, if any."""
    text = generation.text
    citations = tuple(cite(text, prompt, generation.steps))
    claim = short or claim_of(text, citations)
    every = (*quoted_sentences(question, citations, prompt), *sentences)
    speaking = sorted((s for s in every if s.score >= LEAST_SUPPORT), key=lambda s: -s.score)
    by = next((each for each in speaking if supports(each, claim, question)), None)
    quoted = Support.QUOTED if citations else Support.UNSUPPORTED
    return Evidence(citations, Support.SUPPORTED if by else quoted, by)


def quoted_sentences(
    question: str, citations: Iterable[Citation], prompt: Prompt
) -> Iterator[Sentence]:
    """Yield the quotations of an answer with their scores."""
    spans = [(prompt.hits[c.passage - prompt.first], c.start, c.end) for c in citations]
    for span, score in zip(spans, score_spans(question, spans), strict=True):
        yield Sentence(*span, score)


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
    words = set(words_of(claim)) - set(words_of(question))
    same = bool(NEGATION.search(claim)) == bool(NEGATION.search(sentence))
    numbers = set(NUMBER.findall(claim)) <= set(NUMBER.findall(sentence + " " + question))
    stems = {root(word) for word in words_of(sentence)}
    return bool(words) and same and numbers and {root(word) for word in words} <= stems


def root(word: str) -> str:
    """Return a word without an ending, so that "required" is "requires"."""
    return ENDING.sub("", word) if len(word) > 4 else word
