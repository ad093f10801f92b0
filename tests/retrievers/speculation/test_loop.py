"""Text written with guesses equals text written with a search before every stride."""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from ragspec.errors import InputError
from ragspec.retrievers.speculation.loop import SpeculativeRetrieval
from ragspec.retrievers.speculation.os3 import GLANCE, StrideSchedule

Stride = tuple[int, ...]


@dataclass
class World:
    """A toy writer and searcher: strides depend on answer and text, answers on the last tokens."""

    seed: int
    answers: int = 4
    length: int = 40
    every: int = 4
    silent: float = 0.0  # share of queries after the first that have no answer
    sure: float = 0.0  # share of strides without a query
    guess_right: float | None = None  # share of right guesses; None guesses by known answers
    written: int = 0
    queries: list[int] = field(default_factory=list)
    fetched: list[int] = field(default_factory=list)
    further: float = 0.25
    most: int = 16
    always: list[int] | None = None  # the answers of every search

    def _samples(self, *key: object) -> random.Random:
        return random.Random(repr((self.seed, *key)))

    def write(self, answer: int, before: Sequence[Stride]) -> tuple[Stride, bool]:
        self.written += 1
        text = [token for stride in before for token in stride]
        for _ in range(min(self.every, self.length - len(text))):
            text.append(self._samples("token", answer, tuple(text[-6:])).randrange(50))
            if self._samples("end", len(text), text[-1]).random() < 0.01:
                return tuple(text[len(text) - len(text) % self.every or -self.every :]), True
        return tuple(text[sum(map(len, before)) :]), len(text) >= self.length

    def query(self, before: Sequence[Stride]) -> tuple[int, ...] | None:
        text = tuple(token for stride in before for token in stride)
        if before and self._samples("sure", text[-4:]).random() < self.sure:
            return None
        return text[-8:]

    def truth(self, query: tuple[int, ...]) -> list[int]:
        if self.always is not None:
            return self.always
        sample = self._samples("search", query[-3:])
        if query and sample.random() < self.silent:
            return []
        return sample.sample(range(self.answers), self.answers)

    def search(self, queries: Sequence[tuple[int, ...]], k: int) -> list[list[int]]:
        self.queries.append(len(queries))
        self.fetched.append(k)
        return [self.truth(query)[:k] for query in queries]

    def guess(self, query: tuple[int, ...], known: Sequence[int]) -> int | None:
        right = next(iter(self.truth(query)), None)
        if self.guess_right is not None:
            if self._samples("guess", query).random() < self.guess_right:
                return right
            return self._samples("wrong", query).choice([a for a in range(9) if a != right])
        ranked = [answer for answer in self.truth(query) if answer in known]
        return ranked[0] if ranked else None


def plain(world: World) -> tuple[list[Stride], list[int]]:
    """Return strides and answers of a search before every stride."""
    strides: list[Stride] = []
    answers: list[int] = []
    answer = world.truth(())[0]
    while True:
        stride, ended = world.write(answer, strides)
        strides.append(stride)
        answers.append(answer)
        if ended:
            return strides, answers
        query = world.query(strides)
        answer = (world.truth(query) or [answer])[0] if query is not None else answer


@pytest.mark.parametrize("seed", range(0, 1500, 50))
def test_the_text_is_that_of_a_search_before_every_stride(seed: int) -> None:
    for case in range(seed, seed + 50):
        sample = random.Random(case)
        options = {
            "answers": sample.choice([1, 2, 5]),
            "length": sample.randint(1, 60),
            "every": sample.choice([1, 2, 4, 7]),
            "silent": sample.choice([0.0, 0.2]),
            "sure": sample.choice([0.0, 0.0, 0.4, 1.0]),
            "guess_right": sample.choice([None, None, 0.0, 0.6, 1.0]),
        }
        world, selected = World(case, **options), list[Stride]()  # type: ignore[arg-type]
        most = sample.choice([None, None, 1, 2, 3, 5, 16])
        schedule = StrideSchedule(most, sample.choice([None, True, False]))
        more: Any = {"prefetch": sample.choice([1, 3, 20]), "on_accept": selected.append}
        loop = SpeculativeRetrieval(world.write, world, schedule, **more)
        strides, answers = plain(World(case, **options))  # type: ignore[arg-type]
        assert loop.run() == strides
        assert (loop.answers, selected) == (answers, strides)
        report = loop.report
        assert report.strides == len(strides)
        assert world.written == len(strides) + report.wasted
        accepted = [e.accepted for e in report.events if e.what in ("write", "ahead")]
        assert (accepted.count(False), accepted.count(True)) == (report.wasted, len(strides))
        assert (report.calls, report.queries) == (len(world.queries), sum(world.queries))


def test_the_test_above_detects_wrong_guesses_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpeculativeRetrieval, "_take_back", lambda self, end, ahead: None)
    with pytest.raises(AssertionError):
        test_the_text_is_that_of_a_search_before_every_stride(0)


def run(
    world: World, schedule: StrideSchedule
) -> SpeculativeRetrieval[tuple[int, ...], int, Stride]:
    loop = SpeculativeRetrieval(world.write, world, schedule)
    loop.run()
    return loop


def test_right_guesses_save_searches_and_wrong_ones_cost_strides() -> None:
    right = run(World(3, guess_right=1.0), StrideSchedule(4, overlap=False))
    assert right.report.strides == 10
    assert right.report.calls == 1 + 3  # rounds of 4, 4 and 2 strides; the last needs no search
    assert (right.report.hits, right.report.rollbacks, right.report.wasted) == (9, 0, 0)
    wrong = run(World(3, guess_right=0.0), StrideSchedule(4, overlap=False, searched=1e9))
    assert wrong.report.hits == 0
    assert wrong.report.rollbacks == wrong.report.strides - 1
    assert wrong.report.wasted > 0
    world, selected = World(3), list[int]()
    off = SpeculativeRetrieval(world.write, world, StrideSchedule(1, overlap=False))
    off.on_accept = lambda stride: selected.append(len(world.queries))
    off.run()
    assert selected == [*range(1, 11)], "each stride is passed on before the next search"
    assert world.fetched == [20, *[1] * 9] and off.schedule.search.further == world.further
    assert (off.report.calls, off.report.wasted, off.report.gated) == (10, 0, 9)
    assert off.schedule.guesses == 0


def test_the_guess_that_was_right_more_often_is_used() -> None:
    """The answer never changes, and the searcher's guess is always wrong."""
    steady = World(3, guess_right=0.0, length=80, always=[1, 2, 3])
    loop = run(steady, StrideSchedule(4, overlap=False))
    assert loop.schedule.stayed > loop.schedule.searched
    assert loop.report.rollbacks <= 2
    assert loop.report.hits >= loop.report.strides - 3


def test_a_search_overlaps_the_stride_that_follows() -> None:
    """Let each search wait until the next stride has begun, which needs an overlap."""
    begun = threading.Event()

    class Waiting(World):
        def write(self, answer: int, before: Sequence[Stride]) -> tuple[Stride, bool]:
            if self.queries:
                begun.set()
            return super().write(answer, before)

        def search(self, queries: Sequence[tuple[int, ...]], k: int) -> list[list[int]]:
            if self.queries:
                assert begun.wait(20)
            return super().search(queries, k)

    loop = run(Waiting(5, guess_right=1.0), StrideSchedule(1, overlap=True))
    assert loop.strides == plain(World(5))[0]
    assert sum(event.what == "ahead" for event in loop.report.events) > 0


def test_each_answer_is_that_of_the_search_that_confirmed_it() -> None:
    class Scored(int):
        query: tuple[int, ...]

    class Scoring(World):
        def search(self, queries: Sequence[tuple[int, ...]], k: int) -> Any:
            answers = [[Scored(each) for each in row] for row in super().search(queries, k)]
            for query, row in zip(queries, answers, strict=True):
                for answer in row:
                    answer.query = query
            return answers

    loop: Any = run(Scoring(3, guess_right=1.0), StrideSchedule(4, overlap=False))
    for end, answer in enumerate(loop.answers):
        assert answer.query == loop.searcher.query(loop.strides[:end])


def test_only_times_of_single_activities_are_learned() -> None:
    overlapped = run(World(3, length=20), StrideSchedule(1, overlap=True)).schedule
    assert [*map(len, overlapped.search.times.values())] == [1]  # the others overlapped
    assert not overlapped.strides  # the first one reads the prompt, the others overlapped
    silent = run(World(3, sure=1.0), StrideSchedule(2, overlap=False)).schedule
    assert (silent.searched, silent.stayed) == (0.0, 0.0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("fails", ["write", "search", "guess"])
def test_errors_propagate_and_the_worker_thread_ends(fails: str, overlap: bool) -> None:
    def failing(*inputs: object) -> object:
        if world.written >= 3:
            raise OSError("the service is away")
        return getattr(World, fails)(world, *inputs)

    world, threads = World(2), threading.active_count()
    setattr(world, fails, failing)
    with pytest.raises(OSError, match="the service is away"):
        run(world, StrideSchedule(3, overlap=overlap))
    assert threading.active_count() == threads


def test_a_first_search_without_answers_is_refused() -> None:
    with pytest.raises(InputError, match="found nothing"):
        run(World(1, always=[]), StrideSchedule())


def test_cut_leaves_the_final_strides_after_an_interrupt() -> None:
    class Interrupted(World):
        def write(self, answer: int, before: Sequence[Stride]) -> tuple[Stride, bool]:
            if len(before) == 6:
                raise KeyboardInterrupt
            return super().write(answer, before)

    loop = SpeculativeRetrieval(Interrupted(3).write, World(3), StrideSchedule(4, overlap=False))
    with pytest.raises(KeyboardInterrupt):
        loop.run()
    assert loop.cut()
    strides, _ = plain(World(3))
    assert loop.strides == strides[: len(loop.strides)]
    assert len(loop.answers) == len(loop.strides) == loop.report.strides > 0


def test_slow_searches_are_batched_and_fast_ones_are_not() -> None:
    """Sleep for times with ratios of 100; one stalled run of three is tolerated."""

    @dataclass
    class Slow(World):
        stride: float = 0.0
        lookup: float = 0.0

        def write(self, answer: int, before: Sequence[Stride]) -> tuple[Stride, bool]:
            time.sleep(self.stride)
            return super().write(answer, before)

        def search(self, queries: Sequence[tuple[int, ...]], k: int) -> list[list[int]]:
            time.sleep(self.lookup)
            return super().search(queries, k)

    slow = Slow(3, guess_right=1.0, length=80, stride=0.0005, lookup=0.05)
    loop = run(slow, StrideSchedule())
    assert loop.report.calls <= 11 < loop.report.strides == 20
    narrow = Slow(3, guess_right=1.0, length=80, most=2, stride=0.0005, lookup=0.02)
    run(narrow, StrideSchedule())
    assert max(narrow.queries) == 2
    fast = Slow(3, guess_right=1.0, length=80, stride=0.02)
    loop = max((run(fast, StrideSchedule()) for _ in range(3)), key=lambda each: each.report.gated)
    assert loop.report.gated == loop.report.rounds == 19
    assert loop.schedule.next().strides == 1
    assert sum(event.what == "guess" for event in loop.report.events) == 19
    assert loop.report.hits <= 3 + 19 // GLANCE
