"""The answer to a question: its text, citations, passages and prompt."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from ragspec.pipelines.answering.citations import Citation, Support
from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import Generation, report_of
from ragspec.reports.report import Report
from ragspec.retrievers.search.fusion import Hit
from ragspec.retrievers.search.sentences import LEAST_SCORE, Sentence
from ragspec.sampling.stopping import repeats

NO_ANSWER_TEXT = "The documents do not speak of this."
REFUSED, EXTRACTED = "refused", "extracted"  # finish reasons of answers without the model


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of the search for a question.

    Attributes:
        hits: The passages, best first.
        sentences: The sentences that answer the question best, best first.
        refused: Why the question is refused, None if it is not.
    """

    hits: Sequence[Hit] = ()
    sentences: tuple[Sentence, ...] = ()
    refused: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one question, or to one turn of a conversation.

    Attributes:
        passages: The passages of the prompt, in order; those that a turn added to a conversation.
        prompt: The prompt of the model.
        sentences: The sentences of the documents that answer the question best, best first. They do
            not depend on what the model wrote.
        citations: Whole sentences of a document that stand word for word in the text.
        support: How far the documents support the text, see `find_evidence`.
        supporting: The sentence that supports it, None if none does.
        evidence, short: The quoted sentence and the answer proper; "" if the text has none.
        refused: Why the model was not called, else None; the text then says that the documents do
            not cover the question.
        chunks: Chunks of a long document that a model with its own context read.
        dropped_turns: Number of the oldest turns that a conversation dropped before this one.
    """

    question: str
    generation: Generation
    passages: tuple[Hit, ...]
    prompt: Prompt = field(repr=False)
    sentences: tuple[Sentence, ...] = ()
    citations: tuple[Citation, ...] = ()
    support: Support = Support.UNSUPPORTED
    supporting: Sentence | None = None
    evidence: str = ""
    short: str = ""
    refused: str | None = None
    chunks: tuple[Hit, ...] = ()
    dropped_turns: int = 0

    @classmethod
    def refusal(cls, question: str, result: SearchResult) -> Self:
        """Return the answer to a question that the documents do not cover."""
        answer = cls._without_model(question, result, NO_ANSWER_TEXT, REFUSED, result.hits)
        return replace(answer, refused=result.refused)

    @classmethod
    def extract(cls, question: str, result: SearchResult) -> Self:
        """Return the answer of the documents' sentences alone, one below the other."""
        # Without a good sentence, the best one.
        sentences = [s for s in result.sentences if s.score >= LEAST_SCORE] or result.sentences[:1]
        citations, start = list[Citation](), 0
        for number, each in enumerate(sentences, start=1):
            end = start + len(each.text)
            characters = each.start, each.end
            citations.append(Citation.of(each.hit.document, characters, (start, end), number))
            start = end + 1
        text, hits = "\n".join(each.text for each in sentences), [each.hit for each in sentences]
        answer = cls._without_model(question, result, text, EXTRACTED, hits)
        support = Support.QUOTED if citations else Support.UNSUPPORTED
        return replace(answer, citations=tuple(citations), support=support)

    @classmethod
    def _without_model(
        cls, question: str, result: SearchResult, text: str, finish: str, hits: Sequence[Hit]
    ) -> Self:
        """Return an answer whose text no model wrote, over these passages."""
        report = report_of([], [], 0.0, finish)
        return cls(
            question=question,
            generation=Generation(text, [], finish, report.label, report, []),
            passages=tuple(result.hits),
            prompt=Prompt("", (), tuple(hits)),
            sentences=result.sentences,
        )

    @property
    def text(self) -> str:
        """The text of the answer."""
        return self.generation.text

    @property
    def report(self) -> Report:
        """The figures of search and generation."""
        return self.generation.report

    @property
    def label(self) -> str:
        """The guarantee of the text, see `Generation`."""
        return self.generation.label

    @property
    def cut(self) -> bool:
        """Whether the text ended at its limit of tokens."""
        return self.generation.finish_reason == "length"

    @property
    def repeats(self) -> bool:
        """Whether the text ended because it repeated itself."""
        return repeats(self.generation.tokens)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as JSON types."""
        same = ("label", "support", "refused", "cut", "repeats", "evidence")
        return {
            "question": self.question,
            "answer": self.text,
            **{name: getattr(self, name) for name in same},
            "short_answer": self.short,
            "supporting": None if self.supporting is None else self.supporting.to_dict(),
            "sentences": [each.to_dict() for each in self.sentences],
            "left_out": len(self.prompt.left_out),
            "citations": [asdict(each) for each in self.citations],
            "passages": [_record(hit) for hit in self.passages],
            "chunks": [_record(hit) for hit in self.chunks],
            "report": self.report.to_dict(),
        }


def _record(hit: Hit) -> dict[str, object]:
    """Return a passage as JSON types."""
    facts = {"document": hit.document.name, "copies": list(hit.copies), "score": hit.score}
    return asdict(hit.passage) | facts
