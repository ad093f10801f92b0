"""The answer to a question: its text, citations, passages and prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Self

from ragspec.pipelines.answering.citations import Citation
from ragspec.pipelines.answering.prompt import Prompt
from ragspec.reports.generation import Generation, report_of
from ragspec.retrievers.search.fusion import Hit
from ragspec.sampling.stopping import repeats

if TYPE_CHECKING:
    from ragspec.reports.report import Report

NO_ANSWER_TEXT = "The documents do not speak of this."
REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The answer to one question, or to one turn of a conversation.

    Attributes:
        passages: The passages of the prompt, in order; those that a turn added to a conversation.
        prompt: The prompt of the model.
        citations: Pieces of the text that stand word for word in a document.
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
    citations: tuple[Citation, ...] = ()
    evidence: str = ""
    short: str = ""
    refused: str | None = None
    chunks: tuple[Hit, ...] = ()
    dropped_turns: int = 0

    @classmethod
    def refusal(cls, question: str, hits: Sequence[Hit], why: str) -> Self:
        """Return the answer to a question that the documents do not cover."""
        report = report_of([], [], 0.0, REFUSED)
        return cls(
            question=question,
            generation=Generation(NO_ANSWER_TEXT, [], REFUSED, report.label, report, []),
            passages=tuple(hits),
            prompt=Prompt("", (), tuple(hits), (), ()),
            refused=why,
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
    def supported(self) -> bool:
        """Whether any of the text was quoted from a document, word for word."""
        return bool(self.citations)

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
        return {
            "question": self.question,
            "answer": self.text,
            "evidence": self.evidence,
            "short_answer": self.short,
            "supported": self.supported,
            "cut": self.cut,
            "repeats": self.repeats,
            "refused": self.refused,
            "left_out": len(self.prompt.left_out),
            "citations": [asdict(each) | {"place": each.place} for each in self.citations],
            "passages": [_record(hit) for hit in self.passages],
            "chunks": [_record(hit) for hit in self.chunks],
            "label": self.label,
            "report": self.report.to_dict(),
        }


def _record(hit: Hit) -> dict[str, Any]:
    """Return a passage as JSON types."""
    return {
        "document": hit.document.name,
        "title": hit.passage.title,
        "start": hit.passage.start,
        "end": hit.passage.end,
        "score": hit.score,
        "text": hit.passage.text,
    }
