"""Questions over your documents: search, a prompt, a speculative answer, citations."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ragspec.engine.request import refuse_unknown
from ragspec.errors import InputError
from ragspec.pipelines.answering.citations import Citation, cite
from ragspec.pipelines.answering.prompt import Prompt, build_prompt, decoder
from ragspec.pipelines.answering.template import PromptTemplate, find_template, passages_for, suited
from ragspec.reports.generation import Generation, report_of
from ragspec.retrievers.search.dense import DEFAULT_EMBEDDER, Embedder
from ragspec.retrievers.search.documents import Document, ProgressCallback, Skipped, load_documents
from ragspec.retrievers.search.fusion import Hit, Retriever, SearchFunction, as_retriever
from ragspec.retrievers.search.nearest import FLAT
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.passages import WORDS
from ragspec.retrievers.search.sparse import LEAST_COVERAGE
from ragspec.sampling.stopping import EndRepetition, repeats
from ragspec.storage.manifest import Verify

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine
    from ragspec.reports.report import Report
    from ragspec.sampling.settings import Sampling

NO_ANSWER_TEXT = "The documents do not speak of this."
REFUSED = "refused"
NEW_TOKENS = 160
JUDGED = 5  # passages that decide whether the documents cover a question
Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerBase:
    """A generated text with its citations, which stand word for word in a document."""

    generation: Generation
    citations: tuple[Citation, ...] = ()

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(AnswerBase):
    """The answer to one question.

    Attributes:
        text: The text of the model.
        evidence, short: The quoted sentence and the answer proper; "" if `text` has none.
        passages: The passages of the prompt, in order.
        prompt: The prompt of the model.
        refused: Why the model was not called, else None; `text` then says that the documents do not
            cover the question.
        chunks: Chunks of a long document that a model with its own context read.
    """

    question: str
    text: str
    evidence: str
    short: str
    passages: tuple[Hit, ...]
    report: Report
    label: str
    prompt: Prompt = field(repr=False)
    refused: str | None = None
    chunks: tuple[Hit, ...] = ()

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
            "citations": [asdict(citation) for citation in self.citations],
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


class DocQA:
    """Answers questions from documents, with citations.

    Args:
        retriever: An index, or a function from a question to (text, score, meta) triples.
        engine: Generates; None loads the bundled starter model on first use.
        skipped: Files of the folders that were not read, with the reasons.
    """

    def __init__(
        self,
        retriever: Retriever | SearchFunction,
        *,
        engine: Engine | None = None,
        skipped: Iterable[Skipped] = (),
    ) -> None:
        if isinstance(engine, str):
            raise InputError(
                f"got the engine {engine!r}; expected an Engine, such as "
                f"Engine.from_pretrained({engine!r})."
            )
        self.retriever = as_retriever(retriever)
        self.skipped = list(skipped)
        self._engine = engine

    @classmethod
    def from_documents(
        cls,
        paths: Paths,
        *,
        engine: Engine | None = None,
        words: int = WORDS,
        embedder: str | Path | Embedder | None = DEFAULT_EMBEDDER,
        dense: str = FLAT,
        sparse: bool = True,
        on_progress: ProgressCallback = lambda what, done, total: None,
    ) -> DocQA:
        """Read files and folders and index them; see `load_documents` and `PassageIndex.build`."""
        values = [paths] if isinstance(paths, str | os.PathLike) else paths
        if not isinstance(values, Iterable):
            raise InputError(f"got {paths!r} as documents; expected a path, or a list of paths.")
        absolute = [os.path.abspath(path) for path in values]
        loaded = load_documents(absolute, on_progress=on_progress)
        index = PassageIndex.build(
            loaded.documents,
            words=words,
            embedder=embedder,
            dense=dense,
            sparse=sparse,
            paths=absolute,
            on_progress=on_progress,
        )
        return cls(index, engine=engine, skipped=loaded.skipped)

    @classmethod
    def from_index(
        cls,
        path: str | os.PathLike[str],
        *,
        engine: Engine | None = None,
        embedder: str | Path | Embedder | None = None,
        verify: Verify = "full",
    ) -> DocQA:
        """Open an index that `save` wrote; see `PassageIndex.open`."""
        return cls(PassageIndex.open(path, embedder=embedder, verify=verify), engine=engine)

    @property
    def engine(self) -> Engine:
        """The engine; by default that of the starter model, loaded on first use."""
        if self._engine is None:
            from ragspec.engine import engine

            self._engine = engine.Engine.from_pretrained("starter")
        return self._engine

    @property
    def documents(self) -> tuple[Document, ...]:
        """The documents of the index; empty for another retriever."""
        return self.retriever.documents if isinstance(self.retriever, PassageIndex) else ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the index to a folder.

        Raises:
            InputError: The retriever is no index over documents.
        """
        if not isinstance(self.retriever, PassageIndex):
            raise InputError(
                f"A {type(self.retriever).__name__} cannot be saved; only an index made from "
                "documents can."
            )
        self.retriever.save(path)

    def prompt(
        self,
        question: str,
        *,
        max_new_tokens: int = NEW_TOKENS,
        top_k: int | None = None,
        prompt: str | Path | PromptTemplate | None = None,
        system: str | None = None,
    ) -> Prompt:
        """Search, and return the prompt that `ask` gives to the engine."""
        template = self._template(prompt, system)
        hits, _ = self.search(question, passages_for(self.engine) if top_k is None else top_k)
        return self._prompt(question, hits, template, max_new_tokens)

    def _template(
        self, prompt: str | Path | PromptTemplate | None, system: str | None
    ) -> PromptTemplate:
        return find_template(suited(self.engine.tokenizer) if prompt is None else prompt, system)

    def search(self, question: str, top_k: int) -> tuple[list[Hit], str | None]:
        """Return the best passages, and the reason to refuse the question or None.

        The question is judged by the best 5 passages, or by more if `top_k` is larger.

        Raises:
            InputError: The question is empty, or top_k is below 1.
        """
        if top_k < 1:
            raise InputError(f"top_k is {top_k}, expected at least 1.")
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"The question is empty or no text ({question!r}); ask something.")
        if not isinstance(self.retriever, PassageIndex) or self.retriever.sparse is None:
            return self.retriever.search(question, top_k), None  # only a sparse index can judge
        hits = self.retriever.search(question, max(top_k, JUDGED))
        support = self.retriever.support(question, hits)
        if support.covered:
            return hits[:top_k], None
        return hits[:top_k], (
            f"the best passage has {support.coverage:.0%} of the question's words, by their rarity "
            f"(expected {LEAST_COVERAGE:.0%} or more)"
        )

    def _prompt(
        self, question: str, hits: Sequence[Hit], template: PromptTemplate, max_new_tokens: int
    ) -> Prompt:
        limit = self.engine.target.max_length
        room = None if limit is None else limit - max_new_tokens
        return build_prompt(self.engine.tokenizer, question, hits, room=room, template=template)

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        top_k: int | None = None,
        prompt: str | Path | PromptTemplate | None = None,
        system: str | None = None,
        refuse: bool = True,
        stream: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question from the best passages that fit the model's context.

        Args:
            question: The question; it may not be empty.
            sampling: How tokens are chosen; greedy by default.
            max_new_tokens: Most tokens of the answer.
            top_k: Number of passages; None for the model's default, see `passages_for`.
            prompt: "evidence", "quote", "answer", a Jinja file or a `PromptTemplate`; None for the
                model's default, see `suited`.
            system: System message of a chat model.
            refuse: Refuse without calling the model if no document covers the question, see
                `Answer.refused`.
            stream: Called with each piece of text as it is verified. An interrupt then ends the
                answer and keeps its text.
            **options: Further arguments of `Engine.generate`, such as `prediction`.

        Raises:
            InputError: The question is empty, n > 1, or the prompt cannot be written.
            UnknownNameError: The prompt's name is unknown.
            PromptTooLongError: Not even one passage fits.
        """
        refuse_unknown(options)
        if sampling is not None and sampling.n != 1:
            raise InputError(f"ask() gives one answer, got n={sampling.n}; use Engine.generate.")
        began = time.perf_counter()
        template = self._template(prompt, system)
        top_k = passages_for(self.engine) if top_k is None else top_k
        hits, refused = self.search(question, top_k)
        if refused is not None and refuse:
            milliseconds = (time.perf_counter() - began) * 1000
            return self.refusal(question, hits, refused, milliseconds)
        filled = self._prompt(question, hits, template, max_new_tokens)
        milliseconds = (time.perf_counter() - began) * 1000
        options["max_new_tokens"] = max_new_tokens
        generation = generate_answer(self.engine, filled, template, sampling, stream, **options)
        return answer_of(question, filled, template, generation, milliseconds, self.engine)

    @staticmethod
    def refusal(question: str, hits: Sequence[Hit], why: str, milliseconds: float) -> Answer:
        """Return the answer to a question that is refused after a search of `milliseconds`."""
        generation = refusal(milliseconds)
        return Answer(
            question=question,
            text=NO_ANSWER_TEXT,
            evidence="",
            short="",
            citations=(),
            passages=tuple(hits),
            report=generation.report,
            label=generation.label,
            generation=generation,
            prompt=Prompt("", (), tuple(hits), (), ()),
            refused=why,
        )


def generate_answer(
    engine: Engine,
    prompt: Prompt,
    template: PromptTemplate,
    sampling: Sampling | None,
    stream: Callable[[str], None] | None,
    **options: Any,
) -> Generation:
    """Generate the answer to a prompt with the stop strings of its template; see `DocQA.ask`."""
    options = {
        "stop": template.stop,
        "stopping_criteria": [EndRepetition(len(prompt.token_ids))],
        **options,
        "spans": prompt.spans,
        "texts": (*prompt.layout, *options.get("texts", ())),
    }
    ids = list(prompt.token_ids)
    if stream is not None:
        return cast(Generation, drain(engine.stream(ids, sampling, **options), stream))
    return cast(Generation, engine.generate(ids, sampling, **options))


def answer_of(
    question: str,
    prompt: Prompt,
    template: PromptTemplate,
    generation: Generation,
    milliseconds: float,
    engine: Engine,
) -> Answer:
    """Return the answer of a generation, with its parts and its citations.

    Args:
        milliseconds: Time of the search.
    """
    text, decode = generation.text, decoder(engine.tokenizer)
    evidence, short = template.parts(text)
    return Answer(
        question=question,
        text=text,
        evidence=text[slice(*evidence)] if evidence else "",
        short=text[slice(*short)] if short else "",
        citations=tuple(cite(text, prompt, generation.steps, decode, short)),
        passages=prompt.hits,
        report=generation.report.with_retrieval(milliseconds),
        label=generation.label,
        generation=generation,
        prompt=prompt,
    )


def refusal(milliseconds: float) -> Generation:
    """Return the generation of a refused question, after a search of `milliseconds`."""
    report = report_of([], [], 0.0, REFUSED).with_retrieval(milliseconds)
    return Generation(NO_ANSWER_TEXT, [], REFUSED, report.label, report, [])


def drain(chunks: Any, stream: Callable[[str], None]) -> Any:
    """Pass each piece of a text to `stream`; return the generation, even after an interrupt."""
    try:
        for piece in chunks:
            stream(piece)
    except KeyboardInterrupt:
        chunks.close()
    return chunks.result
