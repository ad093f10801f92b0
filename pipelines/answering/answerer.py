"""One way to ask a question: check, search, write a prompt, generate, cite.

A subclass says what the model reads: whole passages (`DocQA`), one long document (`LongDocument`),
passages that are searched again (`IterativeRag`), or the turns before (`Conversation`).
"""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, cast

from ragspec.engine.engine import Engine
from ragspec.engine.handle import Stream
from ragspec.engine.request import check_options, expect_engine, expect_function
from ragspec.errors import InputError
from ragspec.models.block_linear import count_weights
from ragspec.pipelines.answering.answer import Answer, SearchResult
from ragspec.pipelines.answering.citations import find_evidence
from ragspec.pipelines.answering.prompt import Prompt, clean_question
from ragspec.pipelines.answering.template import PromptTemplate, find_template, is_chat, suited
from ragspec.reports.generation import Generation
from ragspec.retrievers.search.fusion import Hit, Retriever, search_hits
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.search.sentences import LEAST_SCORE, rank_sentences
from ragspec.sampling.settings import Sampling, checked_count, seeded
from ragspec.sampling.stopping import EndRepetition

NEW_TOKENS = 160
PASSAGES = 3  # of a prompt
JUDGED = 5  # passages whose sentences are ranked
COPIES = 4  # passages that are searched for each, as some may be copies
SEARCHES = 6  # of a retriever that may have no end, each for twice as many passages
# Parameters below which a chat model answers better over the best sentence alone (SmolLM2-135M:
# benchmarks/RESULTS.md).
SMALL = 500_000_000
OnText = Callable[[str], None]
OnSearch = Callable[[SearchResult], None]


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its search result, and the other arguments of `Answerer.ask`."""

    text: str
    search: SearchResult
    sampling: Sampling = field(default_factory=Sampling)
    stream: OnText | None = None
    options: dict[str, Any] = field(default_factory=dict)


class Answerer(ABC):
    """Answers questions with an engine; a subclass says over what.

    Args:
        engine: Generates; None loads the bundled starter model on first use.
        retriever: Finds the passages of a question; None for none.
        top_k: Most passages of a question; None for 3, or the best sentence alone for a small
            chat model, see `read_hits`.
        prompt: "evidence", "quote", "answer", a Jinja file or a `PromptTemplate`; None for the
            model's default, see `suited`.
        system: System message of a chat model.

    Raises:
        InputError: The engine is none or has no tokenizer, or an argument is out of range.
        UnknownNameError: The prompt's name is unknown.
    """

    def __init__(
        self,
        engine: Engine | None,
        retriever: Retriever | None = None,
        *,
        top_k: int | None = None,
        prompt: str | Path | PromptTemplate | None = None,
        system: str | None = None,
    ) -> None:
        if engine is not None:
            expect_engine(engine)
        self.retriever = retriever
        self._engine = engine
        self._top_k = None if top_k is None else checked_count(top_k, "top_k")
        self._system = system
        self._template = None if prompt is None else find_template(prompt, system)

    @property
    def engine(self) -> Engine:
        """The engine; by default that of the starter model, loaded on first use."""
        if self._engine is None:
            self._engine = Engine.from_pretrained("starter")
        return self._engine

    @property
    def template(self) -> PromptTemplate:
        """The template of the prompts."""
        return self._template or find_template(suited(self.engine.tokenizer), self._system)

    @property
    def top_k(self) -> int:
        """The most passages of a question."""
        if self._top_k is not None:
            return self._top_k
        return JUDGED if self._template is not None and self._template.extracts else PASSAGES

    @property
    def judges(self) -> bool:
        """Whether questions that no document covers are refused."""
        return isinstance(self.retriever, PassageIndex) and self.retriever.sparse is not None

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        refuse: bool = True,
        stream: OnText | None = None,
        on_search: OnSearch | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question.

        Args:
            question: The question; it may not be empty.
            sampling: How tokens are chosen; greedy by default.
            max_new_tokens: Most tokens of the answer.
            refuse: Refuse without calling the model if no document covers the question, see
                `Answer.refused`.
            on_search: Called with the search's result before the model writes.
            stream: Called with each piece of text that is final. An interrupt then ends the answer
                and keeps its text.
            **options: Further arguments of `Engine.generate`, such as `prediction`.

        Raises:
            InputError: The question is empty, n > 1, the search finds nothing, or the prompt cannot
                be written; also the errors of the retriever.
            PromptTooLongError: The prompt does not fit the context, not even with one passage.
        """
        check_options(options, ("spans",), "ask()")
        expect_function(stream, "stream")
        expect_function(on_search, "on_search")
        if not isinstance(refuse, bool):
            raise InputError(f"refuse is {refuse!r}; expected True or False.")
        sampling = seeded(sampling, "ask()")
        question, most = clean_question(question), checked_count(max_new_tokens, "max_new_tokens")
        began = time.perf_counter()
        result = self.search(question, refuse=refuse)
        milliseconds = (time.perf_counter() - began) * 1000
        if on_search is not None:
            on_search(result)
        answer = self.unasked(question, result)
        if answer is None:
            options["max_new_tokens"] = most
            answer = self._write(Question(question, result, sampling, stream, options))
        elif stream is not None and answer.refused is None:
            stream(answer.text)
        milliseconds += answer.report.milliseconds.get("retrieve", 0.0)
        report = answer.report.with_retrieval(milliseconds)
        return replace(answer, generation=replace(answer.generation, report=report))

    def search(self, question: str, *, refuse: bool = True) -> SearchResult:
        """Return the best passages and sentences, and why the question is refused if it is.

        It is refused if no sentence of the best 5 passages reaches `LEAST_SCORE`.
        """
        question = " ".join(clean_question(question).split())
        if self.retriever is None:
            return SearchResult()
        hits = search_unique(self.retriever, question, self.top_k)
        sentences = rank_sentences(question, hits)
        best = max((each.score for each in sentences), default=0.0)
        refused = None
        if refuse and self.judges and best < LEAST_SCORE:
            refused = (
                f"no sentence speaks of the question (the best has a score of {best:.2f}, expected "
                f"{LEAST_SCORE:.2f} or more)"
            )
        return SearchResult(hits[: self.top_k], tuple(sentences), refused)

    def unasked(self, question: str, result: SearchResult) -> Answer | None:
        """Return the answer without the model: a refusal or an extract, None for neither."""
        if result.refused is not None:
            return Answer.refusal(question, result)
        return Answer.extract(question, result) if self.template.extracts else None

    def over(self, engine: Engine) -> Self:
        """Return this answerer with another engine."""
        expect_engine(engine)
        other = copy.copy(self)
        other._engine = engine
        return other

    def read_hits(self, result: SearchResult) -> Sequence[Hit]:
        """Return what the engine reads of a search: the passages or the best sentence."""
        chat = self._top_k is None and is_chat(self.engine.tokenizer)
        if chat and result.sentences and count_weights(self.engine.target.loaded) < SMALL:
            return [result.sentences[0].alone]
        return result.hits

    @abstractmethod
    def _write(self, question: Question) -> Answer:
        """Write the answer to a question over the passages of its search."""

    def _generate(self, prompt: Prompt, question: Question) -> Generation:
        """Generate the text after a prompt; an interrupt of a stream returns the text so far."""
        ids, sampling, stream = list(prompt.token_ids), question.sampling, question.stream
        options = self.options_over(prompt, question.options)
        if stream is not None:
            return drain(self.engine.stream(ids, sampling, **options), stream)
        return cast(Generation, self.engine.generate(ids, sampling, **options))

    def options_over(self, prompt: Prompt, options: Mapping[str, Any], first: int = 0) -> Any:
        """Return the engine's options over a prompt whose passages are numbered from `first` on."""
        return {
            "stop": self.template.stop,
            "stopping_criteria": [EndRepetition(len(prompt.token_ids))],
            **options,
            "spans": [(start, end, first + hit, at) for start, end, hit, at in prompt.spans],
            "texts": (*prompt.layout, *(options.get("texts") or ())),
        }

    def answer_of(self, question: Question, prompt: Prompt, generation: Generation) -> Answer:
        """Return the answer of a generation, with its parts, citations and support."""
        sentences = question.search.sentences
        evidence, short = self.template.parts(generation.text)
        cited, support, by = find_evidence(question.text, generation, prompt, sentences, short)
        return Answer(
            question=question.text,
            generation=generation,
            passages=prompt.hits,
            prompt=prompt,
            sentences=sentences,
            citations=cited,
            support=support,
            supporting=by,
            evidence=evidence,
            short=short,
        )


def search_unique(retriever: Retriever, question: str, many: int) -> list[Hit]:
    """Return `many` hits without copies, of an index at least JUDGED; copies need more searches."""
    first, searches = many, SEARCHES
    if isinstance(retriever, PassageIndex):
        many = max(many, JUDGED)
        first, searches = COPIES * many, len(retriever.passages)
    for k in (first << doubling for doubling in range(searches)):
        hits = search_hits(retriever, question, k)
        results = unique(hits)
        if len(results) >= many or len(hits) < k:
            break
    return results[:many]


def unique(hits: Sequence[Hit]) -> list[Hit]:
    """Return passages without further copies of a text, which they name."""
    alike: dict[str, list[Hit]] = {}
    for hit in hits:
        alike.setdefault(hit.passage.text, []).append(hit)
    results = []
    for first, *more in alike.values():
        names = dict.fromkeys(hit.document.name for hit in more)
        names.pop(first.document.name, None)  # a passage may repeat within a document
        results.append(replace(first, copies=tuple(names)))
    return results


def drain(chunks: Stream, stream: OnText) -> Generation:
    """Pass each piece of a text to `stream`; return the generation, even after an interrupt."""
    try:
        for piece in chunks:
            stream(piece)
    except KeyboardInterrupt:
        chunks.close()
    return chunks.result
