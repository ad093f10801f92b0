"""Speculative retrieval: text is written on guesses of what a search would find, then checked.

RaLMSpec (Zhang et al. 2024, arXiv 2401.14021, algorithm 1). Text is written in strides, each over
what the search finds for the text before it. Instead of waiting for the search, the writer goes on
over the best of what earlier searches found; after some strides all their queries are searched at
once, and the text goes back to the first stride that stood on a wrong guess. So a stride is kept
only where its answer is the one that the search gives for a query of kept text alone: the text is
that of a search before every stride, whatever is guessed.

This file knows no model, index or text: a `StrideWriter` writes, a `Searcher` searches. Where
we deviate: how many strides and whether the search overlaps them, see `schedule`; a stride that
ends the text is checked like any other; a query that finds nothing leaves the answer as it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from ragspec.errors import InputError
from ragspec.reports.report import Event, Retrieval
from ragspec.retrievers.speculation.schedule import StridePlan, StrideSchedule

Query = TypeVar("Query")
ItemT = TypeVar("ItemT", bound=Hashable)
Written = TypeVar("Written")
Answer = TypeVar("Answer", contravariant=True)
Text = TypeVar("Text", contravariant=True)


class StrideWriter(Protocol[Answer, Written]):
    """Writes a text stride by stride: a function of the answer and the text before, no more."""

    def write(self, answer: Answer, before: Sequence[Written]) -> tuple[Written, bool]:
        """Return the next stride over an answer, and whether the text ends with it.

        before: the strides of the text so far, of which later ones may have been taken back.
        """


class Searcher(Protocol[Query, ItemT, Text]):
    """Finds answers for queries; whatever it finds depends on the query alone."""

    def query(self, before: Sequence[Text]) -> Query | None:
        """Return what to search for after these strides; None to go on over the same answer.

        Before the first stride there is always something to search for.
        """

    @property
    def most(self) -> int:
        """Queries that it takes at once without waiting twice."""

    @property
    def further(self) -> float:
        """What each further query of a search adds, as a share of a single one, about."""

    def search(self, queries: Sequence[Query], k: int) -> list[list[ItemT]]:
        """Return at most k answers to each query, best first; equal ones compare equal."""

    def guess(self, query: Query, known: Sequence[ItemT]) -> ItemT | None:
        """Return the best of the known answers, None where none is any good."""


@dataclass(slots=True)
class Guess(Generic[Query, ItemT]):
    """A stride's query, asked after `end` strides of the text, and the answer that was guessed.

    best: of the known answers, by the measure of the search. before: the answer of the last stride.
    """

    end: int
    query: Query | None
    answer: ItemT
    best: ItemT
    before: ItemT


@dataclass(slots=True)
class SpeculativeRetrieval(Generic[Query, ItemT, Written]):
    """One text on its way.

    prefetch: answers that each search brings for later guesses. on_accept: called with every stride
    that has become part of the text.
    """

    writer: StrideWriter[ItemT, Written]
    searcher: Searcher[Query, ItemT, Written]
    schedule: StrideSchedule
    prefetch: int = 20
    on_accept: Callable[[Written], None] = lambda stride: None
    report: Retrieval = field(default_factory=Retrieval)
    strides: list[Written] = field(default_factory=list)
    answers: list[ItemT] = field(default_factory=list)
    _known: dict[ItemT, None] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)
    _summary: int = 0

    def run(self) -> list[Written]:
        """Write the text to its end and return its strides; `answers` has one for each of them.

        Raises InputError where the first search finds nothing, and whatever writer and searcher
        raise.
        """
        self.schedule.search.further = self.searcher.further
        self.schedule.most = min(self.schedule.most, self.searcher.most)
        first = self.searcher.query(())
        results = [] if first is None else self._search([first], self.prefetch)[0]
        if not results:
            raise InputError("The search found nothing for the question; put it in other words.")
        with ThreadPoolExecutor(1, "ragspec-search") as worker:
            answer, ahead = results[0], None
            while True:
                answer, ahead, ended = self._round(answer, ahead, worker)
                self._notify(len(self.strides))
                if ended:
                    break
        self._settle()
        return self.strides

    def cut(self) -> bool:
        """Keep what was not to be taken back, after an interrupt; returns whether there is any."""
        del self.strides[self._summary :], self.answers[self._summary :]
        self._settle()
        return bool(self.strides)

    def _round(
        self, answer: ItemT, ahead: tuple[Written, bool] | None, worker: Executor
    ) -> tuple[ItemT, tuple[Written, bool] | None, bool]:
        """Write some strides, the first over a checked answer, and check the others.

        ahead: the first one where it was written while the round before was checked. Returns the
        answer that comes next, a stride over it if there is one, and whether the text has ended.
        """
        plan, start = self.schedule.next(), len(self.strides)
        guesses, ended = self._write(plan, answer, ahead)
        self._notify(start + 1)
        if not guesses:
            return answer, None, True
        overlapped = plan.overlapped and not ended
        result, ahead = self._check(plan, guesses, worker if overlapped else None)
        right = 0
        for guess, answers in zip(guesses, result, strict=True):
            truth = answers[0] if answers else answer
            self._known.update(dict.fromkeys(answers))
            if plan.guesses and guess.query is not None:
                self.schedule.learn_rivals(guess.best == truth, guess.before == truth)
            if truth != guess.answer:
                self._count(plan, right, wrong=True)
                self._take_back(guess.end, ahead)
                return truth, None, False
            if guess.end < len(self.answers):
                self.answers[guess.end] = truth  # with what this search says of it
            answer, right = truth, right + 1
        self._count(plan, right, wrong=False)
        return answer, ahead, ended

    def _write(
        self, plan: StridePlan, answer: ItemT, ahead: tuple[Written, bool] | None
    ) -> tuple[list[Guess[Query, ItemT]], bool]:
        """Write the strides of a round; return what they stand on, and whether the text ended.

        The last guess is that of the stride that would follow.
        """
        guesses: list[Guess[Query, ItemT]] = []
        for _ in range(plan.strides):
            stride, ended = self._stride(answer) if ahead is None else ahead
            ahead = None
            self.strides.append(stride)
            self.answers.append(answer)
            if ended:
                return guesses, True
            began = time.perf_counter()
            query = self.searcher.query(self.strides)
            result = self._guess(query) if plan.guesses else None
            before, best = answer, answer if result is None else result
            answer = before if self.schedule.stays or query is None else best
            guesses.append(Guess(len(self.strides), query, answer, best, before))
            self._note("guess", began)
        return guesses, False

    def _guess(self, query: Query | None) -> ItemT | None:
        return None if query is None else self.searcher.guess(query, tuple(self._known))

    def _stride(self, answer: ItemT) -> tuple[Written, bool]:
        began = time.perf_counter()
        written = self.writer.write(answer, self.strides)
        milliseconds = self._note("write", began)
        if self.strides:
            self.schedule.strides.append(milliseconds)
        return written

    def _check(
        self, plan: StridePlan, guesses: Sequence[Guess[Query, ItemT]], worker: Executor | None
    ) -> tuple[list[list[ItemT]], tuple[Written, bool] | None]:
        """Search for all queries of a round; with a worker the next stride is written meanwhile."""
        queries = [guess.query for guess in guesses if guess.query is not None]
        k = self.prefetch if plan.guesses else 1
        if not queries:
            return [[] for _ in guesses], None
        if worker is None:
            return _spread(guesses, self._search(queries, k)), None
        began = time.perf_counter()
        searching: Future[list[list[ItemT]]] = worker.submit(self._timed, queries, k)
        before = time.perf_counter()
        try:
            ahead = self.writer.write(guesses[-1].answer, self.strides)
            self._note("ahead", before)
        finally:  # also where the writer fails: no search goes on behind the caller's back
            result = searching.result()
        both, schedule = 1000.0 * (time.perf_counter() - began), self.schedule
        schedule.learn_overlap(schedule.stride_ms, schedule.search.of(len(queries)), both)
        return _spread(guesses, result), ahead

    def _search(self, queries: Sequence[Query], k: int) -> list[list[ItemT]]:
        began = time.perf_counter()
        result = self._timed(queries, k)
        self.schedule.search.learn(len(queries), 1000.0 * (time.perf_counter() - began))
        for answers in result[:1] if not self.strides else ():
            self._known.update(dict.fromkeys(answers))
        return result

    def _timed(self, queries: Sequence[Query], k: int) -> list[list[ItemT]]:
        began = time.perf_counter()
        result = self.searcher.search(queries, max(1, k))
        self._note("search", began, len(queries))
        self.report.calls += 1
        self.report.queries += len(queries)
        return result

    def _count(self, plan: StridePlan, right: int, *, wrong: bool) -> None:
        if plan.guesses:
            self.schedule.learn_guesses(right, wrong)
            self.report.hits += right
            self.report.rollbacks += wrong
        self.report.rounds += 1
        self.report.gated += plan.strides == 1 and not plan.overlapped

    def _settle(self) -> None:
        """Note what is known at the end of the text."""
        report, schedule = self.report, self.schedule
        report.strides = len(self.strides)
        report.stride_ms, report.chance = schedule.stride_ms, schedule.chance
        report.search_ms = schedule.search.to_dict()

    def _take_back(self, end: int, ahead: tuple[Written, bool] | None) -> None:
        """Forget the strides that stood on a wrong guess."""
        wasted = len(self.strides) - end + (ahead is not None)
        self.report.wasted += wasted
        del self.strides[end:], self.answers[end:]
        events = self.report.events
        written = [i for i, event in enumerate(events) if event.what in ("write", "ahead")]
        for i in written[len(written) - wasted :]:
            events[i] = replace(events[i], accepted=False)

    def _notify(self, end: int) -> None:
        """Hand on what will not be taken back."""
        while self._summary < end:
            self.on_accept(self.strides[self._summary])
            self._summary += 1

    def _note(self, what: str, began: float, queries: int = 1) -> float:
        """Note what was done since; returns its milliseconds."""
        start, milliseconds = 1000.0 * (began - self._began), 1000.0 * (time.perf_counter() - began)
        self.report.events.append(Event(what, start, milliseconds, queries))
        return milliseconds


def _spread(guesses: Sequence[Guess[Query, ItemT]], result: list[list[ItemT]]) -> list[list[ItemT]]:
    """Return the answers to every guess's query, none where there was no query."""
    left = iter(result)
    return [[] if guess.query is None else next(left) for guess in guesses]
