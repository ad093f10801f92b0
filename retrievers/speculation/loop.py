"""Speculative retrieval: text is written with guesses of the search's answer, then checked.

RaLMSpec (Zhang et al. 2024, arXiv 2401.14021, algorithm 1). Text is written in strides, each with
the answer that the search gives for the text before it. Instead of waiting for the search, the
writer continues with the best answer of earlier searches. After some strides all their queries are
searched at once, and the text goes back to the first stride with a wrong guess. A stride is kept
only if its answer is the one that the search gives for the kept text before it. So the text is that
of a search before every stride, whatever is guessed.

This file knows no model, index or text: a function writes, a `Searcher` searches. Deviations:
see `schedule` for the number of strides and the overlap; a stride that ends the text is checked
like any other; a query without an answer leaves the answer unchanged.
"""

import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from ragspec.errors import InputError
from ragspec.reports.report import Event, Retrieval
from ragspec.retrievers.speculation.os3 import StridePlan, StrideSchedule

Query = TypeVar("Query")
ItemT = TypeVar("ItemT", bound=Hashable)
StrideT = TypeVar("StrideT")
Text = TypeVar("Text", contravariant=True)


class Searcher(Protocol[Query, ItemT, Text]):
    """Finds answers to queries; an answer depends on its query alone."""

    def query(self, before: Sequence[Text]) -> Query | None:
        """Return the query after these strides, None to continue with the same answer.

        Before the first stride there is always a query.
        """

    @property
    def most(self) -> int:
        """Most queries that one search takes without waiting twice."""

    @property
    def further(self) -> float:
        """Approximate cost of each further query of a search, relative to a single one."""

    def search(self, queries: Sequence[Query], k: int) -> list[list[ItemT]]:
        """Return at most k answers to each query, best first; equal answers compare equal."""

    def guess(self, query: Query, known: Sequence[ItemT]) -> ItemT | None:
        """Return the best of the known answers, None if none is good."""


@dataclass(slots=True)
class Guess(Generic[Query, ItemT]):
    """The query after a stride and the guessed answer.

    Attributes:
        best: Best known answer by the scores of the search.
    """

    query: Query | None
    answer: ItemT
    best: ItemT


@dataclass(slots=True)
class SpeculativeRetrieval(Generic[Query, ItemT, StrideT]):
    """One text in progress.

    Attributes:
        write: Returns the next stride with an answer after the strides so far, and whether the text
            ends with it. It depends on these alone; strides of earlier calls may be discarded.
        prefetch: Answers that each search fetches for later guesses.
        on_accept: Called with every stride that is final.
        answers: The answer of each stride.
    """

    write: Callable[[ItemT, Sequence[StrideT]], tuple[StrideT, bool]]
    searcher: Searcher[Query, ItemT, StrideT]
    schedule: StrideSchedule
    prefetch: int = 20
    on_accept: Callable[[StrideT], None] = lambda stride: None
    report: Retrieval = field(default_factory=Retrieval)
    strides: list[StrideT] = field(default_factory=list)
    answers: list[ItemT] = field(default_factory=list)
    _known: dict[ItemT, None] = field(default_factory=dict)
    _began: float = field(default_factory=time.perf_counter)
    _notified: int = 0  # strides that were passed to `on_accept`

    def run(self) -> list[StrideT]:
        """Write the text to its end and return its strides.

        Raises:
            InputError: The first search has no answer. Other errors pass through.
        """
        self.schedule.search.further = self.searcher.further
        self.schedule.most = min(self.schedule.most, self.searcher.most)
        first = self.searcher.query(())
        answers = [] if first is None else self._search([first], self.prefetch)[0]
        self._known.update(dict.fromkeys(answers))
        if not answers:
            raise InputError("The search found nothing for the question; put it in other words.")
        with ThreadPoolExecutor(1, "ragspec-search") as worker:
            answer, ahead, ended = answers[0], None, False
            while not ended:
                answer, ahead, ended = self._round(answer, ahead, worker)
                self._notify(len(self.strides))
        self.schedule.report(self.report, len(self.strides))
        return self.strides

    def cut(self) -> bool:
        """Truncate the text to its final strides after an interrupt; return whether any is left."""
        del self.strides[self._notified :], self.answers[self._notified :]
        self.schedule.report(self.report, len(self.strides))
        return bool(self.strides)

    def _round(
        self, answer: ItemT, ahead: tuple[StrideT, bool] | None, worker: Executor
    ) -> tuple[ItemT, tuple[StrideT, bool] | None, bool]:
        """Write some strides, the first with a checked answer, and check the others.

        Args:
            ahead: The first stride, if it was written during the check before.

        Returns:
            The next answer, a stride with it if one was written, and whether the text has ended.
        """
        plan, start = self.schedule.next(), len(self.strides)
        guesses, ended = self._write(plan, answer, ahead)
        self._notify(start + 1)
        if not guesses:
            return answer, None, True
        overlapped = plan.overlapped and not ended
        searched, ahead = self._check(plan, guesses, worker if overlapped else None)
        left = iter(searched)
        for right, guess in enumerate(guesses):
            end, answers = start + right + 1, [] if guess.query is None else next(left)
            truth = answers[0] if answers else answer
            self._known.update(dict.fromkeys(answers))
            if plan.guesses and guess.query is not None:
                self.schedule.learn_rivals(guess.best == truth, self.answers[end - 1] == truth)
            if truth != guess.answer:
                self._count(plan, right, wrong=True)
                self._take_back(end, ahead)
                return truth, None, False
            if end < len(self.answers):
                self.answers[end] = truth  # equal, with the score of this search
            answer = truth
        self._count(plan, len(guesses), wrong=False)
        return answer, ahead, ended

    def _write(
        self, plan: StridePlan, answer: ItemT, ahead: tuple[StrideT, bool] | None
    ) -> tuple[list[Guess[Query, ItemT]], bool]:
        """Write the strides of a round; return their guesses, and whether the text ended.

        The last guess is for the stride that would follow.
        """
        guesses: list[Guess[Query, ItemT]] = []
        for _ in range(plan.strides):
            if ahead is None:
                began = time.perf_counter()
                ahead = self.write(answer, self.strides)
                milliseconds = self._note("write", began)
                if self.strides:
                    self.schedule.strides.append(milliseconds)
            (stride, ended), ahead = ahead, None
            self.strides.append(stride)
            self.answers.append(answer)
            if ended:
                return guesses, True
            began = time.perf_counter()
            query = self.searcher.query(self.strides)
            best = answer
            if plan.guesses and query is not None:
                guess = self.searcher.guess(query, tuple(self._known))
                best = answer if guess is None else guess
                # The guess that was right more often lately.
                answer = answer if self.schedule.stayed > self.schedule.searched else best
            guesses.append(Guess(query, answer, best))
            self._note("guess", began)
        return guesses, False

    def _check(
        self, plan: StridePlan, guesses: Sequence[Guess[Query, ItemT]], worker: Executor | None
    ) -> tuple[list[list[ItemT]], tuple[StrideT, bool] | None]:
        """Search for all queries of a round; with a worker, write the next stride meanwhile.

        Returns:
            The answers to each query, and the next stride if it was written.
        """
        queries = [guess.query for guess in guesses if guess.query is not None]
        k = self.prefetch if plan.guesses else 1
        if not queries:
            return [], None
        if worker is None:
            return self._search(queries, k), None
        began = time.perf_counter()
        searching: Future[list[list[ItemT]]] = worker.submit(self._search, queries, k, alone=False)
        before = time.perf_counter()
        try:
            ahead = self.write(guesses[-1].answer, self.strides)
            self._note("ahead", before)
        finally:  # also if the writer fails, so that no search outlives the call
            answers = searching.result()
        both, schedule = 1000.0 * (time.perf_counter() - began), self.schedule
        schedule.learn_overlap(schedule.stride_ms, schedule.search.of(len(queries)), both)
        return answers, ahead

    def _search(self, queries: Sequence[Query], k: int, *, alone: bool = True) -> list[list[ItemT]]:
        """Search and record the time, which the schedule learns unless a stride is written."""
        began = time.perf_counter()
        answers = self.searcher.search(queries, max(1, k))
        milliseconds = self._note("search", began, len(queries))
        if alone:
            self.schedule.search.learn(len(queries), milliseconds)
        self.report.calls += 1
        self.report.queries += len(queries)
        return answers

    def _count(self, plan: StridePlan, right: int, *, wrong: bool) -> None:
        if plan.guesses:
            self.schedule.learn_guesses(right, wrong)
            self.report.hits += right
            self.report.rollbacks += wrong
        self.report.rounds += 1
        self.report.gated += plan.strides == 1 and not plan.overlapped

    def _take_back(self, end: int, ahead: tuple[StrideT, bool] | None) -> None:
        """Discard the strides that were written with a wrong guess."""
        wasted = len(self.strides) - end + (ahead is not None)
        self.report.wasted += wasted
        del self.strides[end:], self.answers[end:]
        events = self.report.events
        written = [i for i, event in enumerate(events) if event.what in ("write", "ahead")]
        for i in written[len(written) - wasted :]:
            events[i] = replace(events[i], accepted=False)

    def _notify(self, end: int) -> None:
        """Pass on the strides up to `end`, which are final."""
        while self._notified < end:
            self.on_accept(self.strides[self._notified])
            self._notified += 1

    def _note(self, what: str, began: float, queries: int = 1) -> float:
        """Record an event that lasted from `began` until now; return its milliseconds."""
        start, milliseconds = 1000.0 * (began - self._began), 1000.0 * (time.perf_counter() - began)
        self.report.events.append(Event(what, start, milliseconds, queries))
        return milliseconds
