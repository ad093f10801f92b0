"""Texts are those of each request alone, whenever others join, leave or are cancelled."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from ragspec import Engine, Sampling
from ragspec.budget.goodput import AutoBudget
from ragspec.engine import scheduler
from ragspec.engine.handle import RequestHandle
from ragspec.errors import EngineClosedError, InputError, QueueFullError
from ragspec.rules.base import Step
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from tests.support.architectures import build
from tests.support.scheduling import REQUESTS, alone, close, engine_of, queries, submit, tokens_of
from tests.support.waiting import until

DRAFTERS = ["plain", "context", "recycling", "suffix", "model", "auto"]


class Clocked(AutoBudget):
    """The policy of "auto" over a cost that is not measured."""

    needs_cost = False


def wait(event: threading.Event) -> None:
    assert event.wait(20)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("budget", [6, Clocked()], ids=["fixed", "auto"])
def test_the_tokens_are_those_of_each_request_alone(
    name: str, budget: Any, target: CausalTarget, expected: list[list[int]]
) -> None:
    rng = random.Random(name)
    with engine_of(target, name, budget).with_limits(3, chunk=16) as pool:
        handles = []
        for each in REQUESTS:
            handles += submit(pool, [each])
            time.sleep(rng.choice([0.0, 0.01]))
        assert [tokens_of(handle) for handle in handles] == expected
    results = [handle.result() for handle in handles]
    assert [result.tokens for result in results] == expected
    for result, (_, _, options) in zip(results, REQUESTS, strict=True):
        assert result.label == "exact"
        assert result.report.tokens == len(result.tokens)
        assert (result.logprobs is None) == (options["logprobs"] is None)
        assert result.logprobs is None or len(result.logprobs) == len(result.tokens)


def test_higher_priorities_start_first_and_tenants_of_one_take_turns(plain: Engine) -> None:
    gates, handles = [threading.Event(), threading.Event()], list[RequestHandle]()

    def add(tenant: str, count: int, priority: int = 0, on_step: Any = None) -> None:
        call: dict[str, Any] = {"max_new_tokens": 1, "ignore_eos": True, "on_step": on_step}
        for _ in range(count):
            handles.append(pool.submit([1, 2], tenant=tenant, priority=priority, **call))

    with plain.with_limits(1) as pool:
        add("a", 1, on_step=lambda *_: wait(gates[0]))
        until(lambda: handles[0].joined > 0)
        for tenant, count in ("a", 4), ("b", 2), ("gone", 1):
            add(tenant, count)
        add("c", 1, on_step=lambda *_: wait(gates[1]))
        for tenant, count, priority in ("a", 3, 0), ("a", 1, 1), ("b", 1, -1):
            add(tenant, count, priority)
        for number in (2, 3, 7):
            handles[number].cancel()
        gates[0].set()
        until(lambda: handles[8].joined > 0)
        add("late", 3)
        gates[1].set()
    started = sorted((each.joined, number) for number, each in enumerate(handles) if each.joined)
    assert [number for _, number in started] == [0, 12, 1, 5, 8, 4, 6, 14, 9, 15, 10, 16, 11, 13]


def test_the_tenant_with_the_fewest_running_texts_is_next(plain: Engine) -> None:
    call: dict[str, Any] = {"ignore_eos": True}
    gate, tenants = threading.Event(), (("a", 40), ("a", 1), ("b", 1), ("b", 1), ("c", 1))
    with plain.with_limits(2) as pool:
        first = pool.submit([1, 2], max_new_tokens=1, on_step=lambda *_: wait(gate), **call)
        until(lambda: first.joined > 0)
        handles = [pool.submit([1, 2], tenant=t, max_new_tokens=n, **call) for t, n in tenants]
        gate.set()
    assert sorted(range(5), key=lambda number: handles[number].joined) == [0, 2, 4, 3, 1]


def test_memory_of_long_texts_is_returned(plain: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    released = list[int]()
    monkeypatch.setattr(scheduler, "LONG", 30)
    monkeypatch.setattr(scheduler, "release_memory", lambda: released.append(1))
    for length, times in (20, 0), (40, 1), (20, 1):
        plain.generate([1] * length, max_new_tokens=2, ignore_eos=True)
        assert len(released) == times


def test_every_sample_of_a_prompt_is_a_request(plain: Engine) -> None:
    prompt, one = "What is a draft?", Sampling(temperature=1.0, seed=4)
    whole = plain.generate(prompt, replace(one, n=3), max_new_tokens=12)
    with plain.with_limits(2) as pool:
        handles = [pool.submit(prompt, one, sample=n, max_new_tokens=12) for n in range(3)]
    assert [handle.result().tokens for handle in handles] == [each.tokens for each in whole]
    assert [handle.result().sample for handle in handles] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["chain", "recurrent"])
def test_models_without_chunked_prefill_serve_several_requests(kind: str) -> None:
    target = PathTarget(build("qwen3_5_text" if kind == "recurrent" else "bloom"))
    engine = Engine(target, drafter="context", budget=3)
    some = [(p, s, {"max_new_tokens": 8, "ignore_eos": True}) for p, s, _ in queries(4)]
    with engine.with_limits(3, chunk=4) as pool:
        handles = submit(pool, some)
    assert [handle.result().tokens for handle in handles] == alone(engine, some)


@pytest.fixture
def held(plain: Engine) -> Iterator[tuple[Engine, threading.Event]]:
    """Return a pool of one slot, whose text waits for the event, and room for one to wait."""
    go = threading.Event()
    with plain.with_limits(1, max_queue_size=1) as pool:
        pool.submit([4, 5], max_new_tokens=2, ignore_eos=True, on_step=lambda *_: wait(go))
        yield pool, go
        go.set()


def test_closing_a_text_wakes_waiting_threads_after_it_is_counted_out(
    held: tuple[Engine, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, open_requests = held[0].scheduler, list[int]()
    until(lambda: any(each.first for each in scheduler._live.values()))  # its step is over

    def notify_all(notify: Callable[[], None] = scheduler._changed.notify_all) -> None:
        open_requests.append(scheduler.open_requests)
        notify()

    monkeypatch.setattr(scheduler._changed, "notify_all", notify_all)
    next(iter(scheduler._live.values())).close()
    assert open_requests[-1] == 0


def test_a_full_queue_refuses_requests(held: tuple[Engine, threading.Event]) -> None:
    pool, go = held
    waiting = pool.submit([4, 5, 6], max_new_tokens=2)
    with pytest.raises(QueueFullError, match=r"2 open req.* batch of 1 and a queue of 1"):
        pool.submit([7, 8])
    assert pool.scheduler.live + pool.scheduler.waiting == 2
    waiting.cancel()
    go.set()
    assert waiting.result().finish_reason == "cancelled" and waiting.result().tokens == []
    assert len(pool.submit([7, 8], max_new_tokens=3, ignore_eos=True).result().tokens) == 3


def test_closing_waits_for_all_texts_and_refuses_others(plain: Engine) -> None:
    pool = plain.with_limits(2)
    (request,), _ = pool.prepare([1, 2], None, {"max_new_tokens": 60, "ignore_eos": True})
    handles = [*submit(pool, REQUESTS), pool.add(request, object())]  # its owner takes no step
    close(pool)
    assert all(handle.done for handle in handles)
    assert {handle.result().finish_reason for handle in handles} <= {"stop", "length"}
    with pytest.raises(EngineClosedError, match="was closed"):
        pool.submit([1, 2])
    pool.close()


def test_a_timeout_of_close_and_an_error_cancel_texts(plain: Engine) -> None:
    def endless(pool: Engine) -> list[RequestHandle]:
        slow: dict[str, Any] = {"max_new_tokens": 400, "on_step": lambda *_: time.sleep(0.01)}
        handles = [pool.submit([4, 5], ignore_eos=True, **slow) for _ in range(3)]
        next(handles[0])
        return handles

    pool = plain.with_limits(2)
    handles = endless(pool)
    pool.close(timeout=0.01)
    with pytest.raises(KeyError), plain.with_limits(2) as other:
        handles += endless(other)
        raise KeyError
    assert {handle.result().finish_reason for handle in handles} == {"cancelled"}
    assert all(handle.done for handle in handles)


@pytest.mark.parametrize(
    ("arguments", "options", "match"),
    [
        (([],), {}, "prompt"),
        (([[1], [2]],), {}, "2 prompts"),
        (([1], Sampling(n=2, temperature=1.0)), {}, "n=2"),
        (([1],), {"sample": -1}, "sample is -1"),
    ],
)
def test_requests_are_checked_when_they_are_submitted(
    arguments: Any, options: dict[str, Any], match: str, plain: Engine
) -> None:
    with plain.with_limits(8) as pool:
        with pytest.raises(InputError, match=match):
            pool.submit(*arguments, **options)
        assert pool.scheduler.live + pool.scheduler.waiting == 0


@pytest.mark.parametrize("numbers", [{"max_batch_size": 0}, {"chunk": 0}, {"max_queue_size": -1}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, int], plain: Engine) -> None:
    with pytest.raises(InputError, match="at least"):
        plain.with_limits(**{"max_batch_size": 8, **numbers})


def test_engines_of_one_scheduler_serve_together(plain: Engine, expected: list[list[int]]) -> None:
    message = list[list[int]]()
    with plain.with_limits(3) as pool:
        drafting = pool.with_drafter("context", 6)
        end = drafting.on_finish(lambda generation: message.append(generation.tokens))
        mixed = [
            (drafting if i % 2 else pool).submit(p, s, **o) for i, (p, s, o) in enumerate(REQUESTS)
        ]
    end()
    assert [handle.result().tokens for handle in mixed] == expected
    assert {handle.result().report.budget for handle in mixed[::2]} == {"none"}
    assert sorted(message) == sorted(expected[1::2])


def test_a_call_within_a_step_is_refused_and_one_between_steps_is_served(plain: Engine) -> None:
    pool = plain.with_limits(8)
    whole = plain.generate([4, 5, 6], max_new_tokens=4).tokens

    def criterion(ids: Any, scores: Any) -> bool:
        pool.generate([4, 5, 6], max_new_tokens=4)
        return False

    with pytest.raises(InputError, match="in the middle of one of its own steps"):
        pool.generate([1, 2, 3], max_new_tokens=3, stopping_criteria=[criterion])
    assert pool.scheduler.open_requests == 0
    texts: list[list[int]] = []

    def on_step(number: int, step: Step) -> None:
        texts.append(pool.generate([4, 5, 6], max_new_tokens=4).tokens)

    result = pool.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True, on_step=on_step)
    assert texts == [whole] * 3
    assert result.tokens == plain.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True).tokens


def test_a_thread_takes_the_steps_of_two_callers(plain: Engine) -> None:
    engine = plain.with_limits(8)
    requests, _ = engine.prepare([[1, 2], [3, 4]], None, {"max_new_tokens": 4})
    handles = [engine.add(request, object()) for request in requests]
    assert all(len(handle.future.result(timeout=30).tokens) == 4 for handle in handles)


def test_the_owner_of_requests_may_take_their_steps(
    plain: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, owner, handles = plain.with_limits(3), object(), list[RequestHandle]()
    monkeypatch.setattr(plain.target, "piece", 8)
    for prompt, sampling, options in (REQUESTS[0], *REQUESTS[:3]):
        (request,), _ = pool.prepare(prompt, sampling, options)  # type: ignore[arg-type]
        handles.append(pool.add(request, owner))
    pool.step()
    handles[0].close()  # it reads the prompt for both
    while pool.step():
        pass
    assert [each.result().tokens for each in handles[1:]] == expected[:3]
    assert handles[0].result().finish_reason == "cancelled"
