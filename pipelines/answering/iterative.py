"""Iterative RAG: the passage in the prompt is searched again every few tokens of the answer.

In-context RALM (Ram et al. 2023, arXiv 2302.00083): the last tokens of question and answer are the
query, and the best passage replaces the one before. Speculation hides the time of these searches
(RaLMSpec, arXiv 2401.14021; see `retrievers.speculation.loop`). The text is the same as that of
searching every time.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ragspec.engine.engine import Engine
from ragspec.engine.prompts import stop_strings
from ragspec.engine.request import check_options
from ragspec.errors import InputError
from ragspec.pipelines.answering.answer import Answer, SearchResult
from ragspec.pipelines.answering.answerer import Answerer, Question
from ragspec.pipelines.answering.prompt import Prompt, clean_question, passage_first
from ragspec.pipelines.answering.strides import IN_CALLS, FinalText, PassageWriter, Stride, query_of
from ragspec.pipelines.answering.template import PromptTemplate
from ragspec.reports.generation import Generation
from ragspec.reports.report import joined
from ragspec.retrievers.search.fusion import Retriever, SearchFunction, SearchMode, as_retriever
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.speculation.loop import SpeculativeRetrieval
from ragspec.retrievers.speculation.os3 import StrideSchedule
from ragspec.retrievers.speculation.passages import (
    IndexSearcher,
    RetrievedPassage,
    RetrieverSearcher,
)
from ragspec.sampling.settings import checked_count, is_number

Retrieval = SpeculativeRetrieval[Any, RetrievedPassage, Stride]


@dataclass(frozen=True, slots=True, kw_only=True)
class IterativeSearch:
    """When `IterativeRag` searches, for what, and how it hides the time of searches.

    Attributes:
        stride: Tokens between two searches.
        query_tokens: Last tokens of question and answer that make a query.
        search: "dense", "sparse" or "fused"; None for the best that the index supports.
        speculate: "auto", "off", or the number of strides written on guesses. It never changes the
            text, unless a retriever answers the same query in different ways: some queries are
            repeated, and the label is `approximate` if an answer changes.
        prefetch: Passages that one search returns for later guesses.
        overlap: Write the next stride while a search runs. None decides by cost, and never overlaps
            for an index in this process (0.8 to 1.0 of the speed without).
        flare: Search only after strides with a token below this probability (FLARE, Jiang et al.
            2023, arXiv 2305.06983, section 3.2; without its look-ahead sentence).
        rounds: Write the whole answer this many times in place of strides, each over the passage
            for the question and the answer before (Iter-RetGen, Shao et al. 2023,
            arXiv 2305.15294, section 3.1).
    """

    stride: int = 4
    query_tokens: int = 32
    search: SearchMode | str | None = None
    speculate: str | int = "auto"
    prefetch: int = 20
    overlap: bool | None = None
    flare: float | None = None
    rounds: int | None = None

    def __post_init__(self) -> None:
        checked_count(self.stride, "stride")
        checked_count(self.query_tokens, "query_tokens")
        checked_count(self.prefetch, "prefetch", 0)
        checked_count(1 if self.rounds is None else self.rounds, "rounds")
        StrideSchedule.named(self.speculate, self.overlap)
        if self.search is not None and self.search not in list(SearchMode):
            raise InputError(f"search is {self.search!r}; expected one of {', '.join(SearchMode)}.")
        if not isinstance(self.overlap, bool | None):
            raise InputError(f"overlap is {self.overlap!r}; expected True, False, or None.")
        if self.flare is not None and not (is_number(self.flare) and 0.0 < self.flare <= 1.0):
            raise InputError(f"flare is {self.flare!r}; expected a probability above 0, at most 1.")
        if self.rounds is not None and self.flare is not None:
            raise InputError("got rounds and flare; expected one of them: rounds have no strides.")


class IterativeRag(Answerer):
    """Answers questions and searches for a new passage every few tokens.

    `Answer.passages` has one for each stride, and `report.retrieval` the searches. Measured times
    and the success of guesses carry over to the next question.

    Args:
        retriever: A `PassageIndex`, any `Retriever`, or a function as `DocQA` takes it.
        prompt, system: See `Answerer`.

    Raises:
        InputError: The retriever does not support the search, or the rule is not exact.
    """

    def __init__(
        self,
        engine: Engine,
        retriever: Retriever | SearchFunction,
        settings: IterativeSearch | None = None,
        *,
        prompt: str | Path | PromptTemplate | None = None,
        system: str | None = None,
    ) -> None:
        super().__init__(engine, as_retriever(retriever), top_k=1, prompt=prompt, system=system)
        if not isinstance(settings, IterativeSearch | None):
            raise InputError(f"got {settings!r} as settings; expected an IterativeSearch, or None.")
        self.retriever: Retriever
        self.settings = settings = IterativeSearch() if settings is None else settings
        self.mode = self._mode(settings.search)
        overlap = settings.overlap
        if overlap is None and isinstance(self.retriever, PassageIndex):
            overlap = False  # it takes the cores and the memory that the model needs
        self.schedule = StrideSchedule.named(settings.speculate, overlap)
        self._repeats: list[bool] = []  # see `RetrieverSearcher`

    def _mode(self, search: SearchMode | str | None) -> SearchMode:
        """Return the search mode; raise InputError if the retriever does not support it."""
        if not isinstance(self.retriever, PassageIndex):
            if search is not None:
                raise InputError(
                    f"got search={search!r} with a {type(self.retriever).__name__}, which searches "
                    "in its own way; expected none. It is for a PassageIndex."
                )
            return SearchMode.FUSED
        if search is not None and self.retriever.reranker is not None:
            raise InputError(f"got search={search!r} with a reranker; leave one of them out.")
        mode = SearchMode(search or self.retriever.mode)
        self.retriever.check(mode)
        return mode

    def search(self, question: str, *, refuse: bool = True) -> SearchResult:
        """Judge a question, or find its extract; the strides search for its passages."""
        question = clean_question(question)
        searches = self.judges or self.template.extracts
        return super().search(question, refuse=refuse) if searches else SearchResult()

    def _write(self, question: Question) -> Answer:
        began = time.perf_counter()
        tokenizer, options, settings = self.engine.tokenizer, question.options, self.settings
        check_options(options, IN_CALLS, "IterativeRag")
        if settings.flare is not None:
            options = {**options, "logprobs": options.get("logprobs") or 0}
        stops = stop_strings(options.get("stop", self.template.stop))
        text = FinalText(question.stream, tokenizer, stops)

        @cache
        def prompt_of(passage: RetrievedPassage) -> Prompt:
            return passage_first(tokenizer, question.text, passage.hit, self.template)

        def show(stride: Stride) -> None:
            if settings.rounds is None:  # another round may change the text
                text.push(stride.generation.prompt_tokens, stride.tokens)

        writer = PassageWriter(
            self.engine.without_callbacks(),
            prompt_of,
            lambda prompt, number: self.options_over(prompt, options, number),
            question.sampling,
            settings.stride,
            settings.rounds,
        )
        repeats = len(self._repeats)
        loop: Retrieval = SpeculativeRetrieval(
            writer.write,
            self._searcher(" ".join(question.text.split())),
            self.schedule,
            prefetch=1 if settings.speculate == "off" else max(1, settings.prefetch),
            on_accept=show,
        )
        try:
            with self.engine.scheduler.hold():
                loop.run()
        except KeyboardInterrupt:
            if question.stream is None or not loop.cut():
                raise
            last = loop.strides[-1]
            loop.strides[-1] = replace(last, generation=last.generation.cancelled())
        last = loop.strides[-1]
        rest = () if settings.rounds is None else last.tokens
        text.push(last.generation.prompt_tokens, rest, ends=True)
        passages = tuple(passage.hit for passage in loop.answers)
        prompt = replace(prompt_of(loop.answers[-1]), hits=passages, spans=(), chars=())
        loop.report.queries += len(self._repeats) - repeats
        loop.report.changed = self._repeats.count(False)
        answer = self.answer_of(question, prompt, self._joined(loop, time.perf_counter() - began))
        self.engine.notify(answer.generation)
        return answer

    def _searcher(self, question: str) -> IndexSearcher[Stride] | RetrieverSearcher[Stride]:
        settings, tokenizer = self.settings, self.engine.tokenizer

        def words(before: Sequence[Stride]) -> str | None:
            if settings.rounds is not None:
                return " ".join([question, *(each.generation.text for each in before[-1:])])
            if settings.flare is not None and before and before[-1].least >= settings.flare:
                return None
            return query_of(tokenizer, question, before, settings.query_tokens)

        index = self.retriever
        if isinstance(index, PassageIndex) and index.reranker is None:
            return IndexSearcher(index, words, self.mode)
        return RetrieverSearcher(self.retriever, words, repeats=self._repeats)

    def _joined(self, loop: Retrieval, seconds: float) -> Generation:
        """Return the whole text of strides, or the last round, as one generation."""
        strides, last = loop.strides, loop.strides[-1].generation
        text = strides if self.settings.rounds is None else strides[-1:]
        unique = list({id(each): each for each in strides}.values())  # rounds may share a stride
        report = joined([s.generation.report for s in unique], last.tokens, seconds, loop.report)
        if loop.report.changed:
            report = replace(report, label="approximate")
        steps = [step for each in text for step in each.generation.steps]
        logprobs = None
        if text[0].generation.logprobs is not None:
            logprobs = [item for each in text for item in each.generation.logprobs or ()]
        return replace(last, report=report, label=report.label, steps=steps, logprobs=logprobs)
