"""Iterative RAG: the passage in the prompt is searched again every few tokens of the answer.

In-context RALM (Ram et al. 2023, arXiv 2302.00083): the last tokens of question and answer are the
query, and the best passage replaces the one before. Speculation hides the time of these searches
(RaLMSpec, arXiv 2401.14021; see `retrievers.speculation.loop`). The text is the same as that of
searching every time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ragspec.engine.request import refuse_unknown, stop_strings
from ragspec.errors import InputError
from ragspec.pipelines.answering.docqa import NEW_TOKENS, Answer, DocQA, answer_of
from ragspec.pipelines.answering.prompt import Prompt
from ragspec.pipelines.answering.strides import (
    FinalText,
    PassageWriter,
    RoundWriter,
    Stride,
    StridePrompts,
    tokens_of,
)
from ragspec.pipelines.answering.template import PromptTemplate, find_template, suited
from ragspec.reports.report import joined
from ragspec.retrievers.search.fusion import Retriever, SearchFunction, SearchMode, as_retriever
from ragspec.retrievers.search.passage_index import PassageIndex
from ragspec.retrievers.speculation.loop import Searcher, SpeculativeRetrieval
from ragspec.retrievers.speculation.passages import (
    IndexSearcher,
    RetrievedPassage,
    RetrieverSearcher,
)
from ragspec.retrievers.speculation.schedule import StrideSchedule
from ragspec.sampling.settings import Sampling, seeded

if TYPE_CHECKING:
    from ragspec.engine.engine import Engine

STRIDE, QUERY_TOKENS, PREFETCH = 4, 32, 20


class IterativeRag:
    """Answers questions and searches for a new passage every few tokens.

    Measured times and the success of guesses carry over to the next question.

    Args:
        engine: Writes the answers.
        retriever: A `PassageIndex`, any `Retriever`, or a function as `DocQA` takes it.
        stride: Tokens between two searches.
        query_tokens: Last tokens of question and answer that make a query.
        search: "dense", "sparse" or "fused"; None for the best that the index supports.
        speculate: "auto", "off", or the number of strides written on guesses. It never changes the
            text.
        prefetch: Passages that one search returns for later guesses.
        overlap: Write the next stride while a search runs. None decides by cost, and never overlaps
            for an index in this process (0.8 to 1.0 of the speed without).
        flare: Search only after strides with a token below this probability (FLARE, Jiang et al.
            2023, arXiv 2305.06983, section 3.2; without its look-ahead sentence).
        rounds: Write the whole answer this many times in place of strides, each over the passage
            for the question and the answer before (Iter-RetGen, Shao et al. 2023,
            arXiv 2305.15294, section 3.1).
        prompt, system: See `DocQA.ask`.

    Raises:
        InputError: An argument is out of range, or the rule is not exact.
    """

    def __init__(
        self,
        engine: Engine,
        retriever: Retriever | SearchFunction,
        *,
        stride: int = STRIDE,
        query_tokens: int = QUERY_TOKENS,
        search: SearchMode | str | None = None,
        speculate: str | int = "auto",
        prefetch: int = PREFETCH,
        overlap: bool | None = None,
        flare: float | None = None,
        rounds: int | None = None,
        prompt: str | Path | PromptTemplate | None = None,
        system: str | None = None,
    ) -> None:
        if engine.tokenizer is None:
            raise InputError("The engine has no tokenizer; questions over documents need one.")
        for name, value in (("stride", stride), ("query_tokens", query_tokens)):
            if value < 1:
                raise InputError(f"{name} is {value}; expected at least 1 token.")
        if flare is not None and not 0.0 < flare <= 1.0:
            raise InputError(f"flare is {flare}; expected a probability above 0, at most 1.")
        if rounds is not None and rounds < 1:
            raise InputError(f"rounds is {rounds}; expected at least 1, or None for strides.")
        if rounds is not None and flare is not None:
            raise InputError("got rounds and flare; expected one of them: rounds have no strides.")
        self.flare = flare
        self.rounds = rounds
        self.engine = engine
        self.retriever = as_retriever(retriever)
        self._documents = DocQA(self.retriever, engine=engine)
        self.stride = stride
        self.query_tokens = query_tokens
        self.mode = self._mode(search)
        if overlap is None and isinstance(self.retriever, PassageIndex):
            overlap = False  # it takes the cores and the memory that the model needs
        self.schedule = StrideSchedule.named(speculate, overlap)
        self.prefetch = 1 if speculate == "off" else max(1, prefetch)
        self.template = find_template(
            suited(engine.tokenizer) if prompt is None else prompt, system
        )

    def _mode(self, search: SearchMode | str | None) -> SearchMode:
        """Return the search mode; raise InputError if the retriever does not support it."""
        if not isinstance(self.retriever, PassageIndex):
            if search is not None:
                raise InputError(
                    f"got search={search!r} with a {type(self.retriever).__name__}, which searches "
                    "in its own way; expected none. It is for a PassageIndex."
                )
            return SearchMode.FUSED
        if search is not None and search not in list(SearchMode):
            raise InputError(f"search is {search!r}; expected one of {', '.join(SearchMode)}.")
        mode = SearchMode(search or self.retriever.mode)
        self.retriever.check(mode)
        return mode

    def ask(
        self,
        question: str,
        sampling: Sampling | None = None,
        *,
        max_new_tokens: int = NEW_TOKENS,
        refuse: bool = True,
        stream: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Answer:
        """Answer a question; `passages` has one for each stride, `report.retrieval` the searches.

        Args:
            refuse: See `DocQA.ask`.
            stream: Called with text that is final. An interrupt then ends the answer and keeps its
                text.
            options: Further arguments of `Engine.generate`.

        Raises:
            InputError: The question is empty, n is above 1, or the search finds nothing; also the
                errors of the retriever.
            PromptTooLongError: A passage does not fit the context.
        """
        refuse_unknown(options)
        sampling = seeded(sampling or Sampling(), "ask()")
        began = time.perf_counter()
        if not isinstance(question, str) or not question.strip():
            raise InputError(f"The question is empty or no text ({question!r}); ask something.")
        if refuse and isinstance(self.retriever, PassageIndex) and self.retriever.sparse:
            hits, why = self._documents.search(question, 1)
            if why is not None:
                return DocQA.refusal(question, hits, why, 1000 * (time.perf_counter() - began))
        prompts = StridePrompts(self.engine.tokenizer, " ".join(question.split()), self.template)
        options = {"stop": self.template.stop, **options, "max_new_tokens": max_new_tokens}
        stops = stop_strings(options["stop"], self.engine.tokenizer)
        text = FinalText(stream, self.engine.tokenizer, stops)

        def show(stride: Stride) -> None:
            last = stride.generation
            if self.rounds is None:  # another round may change the text
                text.push(last.prompt_tokens, stride.tokens, ends=last.finish_reason != "paused")

        scored = self.flare is not None
        strides = PassageWriter(
            self.engine.without_callbacks(), prompts, sampling, options, self.stride, scored
        )
        loop = SpeculativeRetrieval(
            strides if self.rounds is None else RoundWriter(strides, self.rounds),
            self._searcher(prompts),
            self.schedule,
            prefetch=self.prefetch,
            on_accept=show,
        )
        try:
            with self.engine.hold():
                loop.run()
        except KeyboardInterrupt:
            if stream is None or not loop.cut():
                raise
            loop.strides[-1] = loop.strides[-1].cancelled()
        last = loop.strides[-1]
        if self.rounds is not None:
            text.push(last.generation.prompt_tokens, last.tokens, ends=True)
        text.end()
        answer = self._answer(question, prompts, loop, time.perf_counter() - began)
        self.engine.notify(answer.generation)
        return answer

    def _searcher(self, prompts: StridePrompts) -> Searcher[Any, RetrievedPassage, Stride]:
        def words(before: Sequence[Stride]) -> str | None:
            if self.rounds is not None:
                return " ".join([prompts.question, *(each.generation.text for each in before[-1:])])
            if self.flare is not None and before and before[-1].least >= self.flare:
                return None
            return prompts.words(tokens_of(before), self.query_tokens)

        if isinstance(self.retriever, PassageIndex):
            return IndexSearcher(self.retriever, words, self.mode)
        return RetrieverSearcher(self.retriever, words)

    def _answer(
        self,
        question: str,
        prompts: StridePrompts,
        loop: SpeculativeRetrieval[Any, RetrievedPassage, Stride],
        seconds: float,
    ) -> Answer:
        strides, last = loop.strides, loop.strides[-1].generation
        text = strides if self.rounds is None else strides[-1:]
        hits = tuple(passage.hit for passage in loop.answers)
        final = prompts.of(loop.answers[-1])
        prompt = Prompt(final.text, final.ids, hits, (), ())
        unique = list({id(each): each for each in strides}.values())  # rounds may share a stride
        report = joined([each.generation.report for each in unique], last.tokens, seconds)
        searching = sum(e.milliseconds for e in loop.report.events if e.what in ("search", "guess"))
        report = replace(
            report,
            tokens=len(last.tokens),
            retrieval=loop.report,
            milliseconds={**report.milliseconds, "retrieve": searching},
        )
        answer = answer_of(question, prompt, self.template, last, 0.0, self.engine)
        steps = [step for each in text for step in each.generation.steps]
        logprobs = None
        if text[0].generation.logprobs is not None:
            logprobs = [item for each in text for item in each.generation.logprobs or ()]
        last = replace(last, report=report, steps=steps, logprobs=logprobs)
        return replace(answer, report=report, generation=last)
