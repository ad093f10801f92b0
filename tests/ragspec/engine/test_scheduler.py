"""Texts that join, leave and are cancelled at any time are those that each has alone."""

import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec.budget.forward_cost import ForwardCost
from ragspec.budget.goodput import AutoBudget
from ragspec.drafters.base import DraftContext, Drafter, DraftRequest, DraftSession, SourceText
from ragspec.engine import scheduler
from ragspec.engine.engine import Engine
from ragspec.engine.handle import RequestHandle
from ragspec.engine.loop import Loop
from ragspec.engine.prefill import PrefillJob
from ragspec.errors import CallbackError, EngineClosedError, InputError, QueueFullError
from ragspec.rules.base import Step
from ragspec.sampling.settings import Sampling
from ragspec.trees.draft_tree import DraftTree
from ragspec.verification import prefix_cache
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from ragspec.verification.sequence_cache import SequenceCache
from ragspec.verification.tree_session import TreeSession
from tests.support import tiny
from tests.support.architectures import build
from tests.support.calls import failing as failing_at
from tests.support.waiting import until

DRAFTERS = ["plain", "context", "recycling", "suffix", "model", "auto"]
Requests = tuple[list[int], Sampling, dict[str, Any]]


@pytest.fixture(scope="module")
def target(plain: Engine) -> CausalTarget:
    return plain.target


class Clocked(AutoBudget):
    """The policy of "auto" over a curve that nobody had to measure."""

    needs_cost = False


def engine_of(target: CausalTarget, name: str, budget: int | AutoBudget = 6) -> Engine:
    drafter = None if name in ("plain", "model") else name
    draft = tiny.model("llama", seed=1, dtype=torch.float64) if name == "model" else None
    engine = Engine(target, tiny.tokenizer(), drafter=drafter, draft_model=draft, budget=budget)
    engine.cost = ForwardCost() if isinstance(budget, AutoBudget) else None
    return engine


def serving(
    engine: Engine, max_batch_size: int = 8, chunk: int = 256, max_queue_size: int | None = None
) -> Engine:
    return engine.with_limits(max_batch_size, max_queue_size, chunk)


def queries(count: int, seed: int = 0) -> list[Requests]:
    """Return requests of all kinds; some prompts begin alike."""
    rng = random.Random(seed)
    parts = [tiny.prompt(rng.randrange(5, 30), seed=number) for number in range(4)]
    results = []
    for number in range(count):
        prompt = [*rng.choice(parts), *rng.choice(parts)[: rng.randrange(4)], *rng.choice(parts)]
        sampling = Sampling(
            temperature=rng.choice([0.0, 0.9]),
            seed=number,
            repetition_penalty=rng.choice([None, 1.2]),
        )
        options: dict[str, Any] = {
            "max_new_tokens": rng.randrange(1, 24),
            "stop": rng.choice([(), ("e",)]),
            "logprobs": rng.choice([None, 2]),
        }
        if rng.random() < 0.3:
            options["texts"] = [SourceText(tuple(rng.choice(parts)))]
        if rng.random() < 0.3:
            options["prediction"] = rng.choice(parts)
        results.append((prompt, sampling, options))
    return results


def alone(engine: Engine, requests: Sequence[Requests]) -> list[list[int]]:
    return [engine.generate(prompt, s, **options).tokens for prompt, s, options in requests]


def submit(pool: Engine, requests: Sequence[Requests], **more: Any) -> list[RequestHandle]:
    return [pool.submit(prompt, s, **options, **more) for prompt, s, options in requests]


def tokens_of(handle: RequestHandle) -> list[int]:
    return [token for step in handle for token in step.tokens]


REQUESTS = queries(12)


@pytest.fixture(scope="module")
def expected(plain: Engine) -> list[list[int]]:
    return alone(plain, REQUESTS)


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("budget", [6, Clocked()], ids=["fixed", "auto"])
def test_the_tokens_are_those_of_each_request_alone(
    name: str, budget: Any, target: CausalTarget, expected: list[list[int]]
) -> None:
    rng = random.Random(name)
    with serving(engine_of(target, name, budget), max_batch_size=3, chunk=16) as pool:
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

    with serving(plain, max_batch_size=1) as pool:
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


def test_a_place_goes_to_the_tenant_with_the_fewest_texts_in_the_batch(plain: Engine) -> None:
    call: dict[str, Any] = {"ignore_eos": True}
    gate, tenants = threading.Event(), (("a", 40), ("a", 1), ("b", 1), ("b", 1), ("c", 1))
    with serving(plain, max_batch_size=2) as pool:
        first = pool.submit([1, 2], max_new_tokens=1, on_step=lambda *_: wait(gate), **call)
        until(lambda: first.joined > 0)
        handles = [pool.submit([1, 2], tenant=t, max_new_tokens=n, **call) for t, n in tenants]
        gate.set()
    assert sorted(range(5), key=lambda number: handles[number].joined) == [0, 2, 4, 3, 1]


def test_the_memory_of_long_texts_is_returned_to_the_system(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = list[int]()
    monkeypatch.setattr(scheduler, "LONG", 30)
    monkeypatch.setattr(scheduler, "release_memory", lambda: released.append(1))
    for length, times in (20, 0), (40, 1), (20, 1):
        plain.generate([1] * length, max_new_tokens=2, ignore_eos=True)
        assert len(released) == times


def test_every_sample_of_a_prompt_is_a_request(plain: Engine) -> None:
    prompt, one = "What is a draft?", Sampling(temperature=1.0, seed=4)
    whole = plain.generate(prompt, replace(one, n=3), max_new_tokens=12)
    with serving(plain, max_batch_size=2) as pool:
        handles = [pool.submit(prompt, one, sample=n, max_new_tokens=12) for n in range(3)]
    assert [handle.result().tokens for handle in handles] == [each.tokens for each in whole]
    assert [handle.result().sample for handle in handles] == [0, 1, 2]


@pytest.mark.parametrize("kind", ["chain", "recurrent"])
def test_models_that_read_a_prompt_at_once_have_pools_too(kind: str) -> None:
    target = PathTarget(build("qwen3_5_text" if kind == "recurrent" else "bloom"))
    engine = Engine(target, drafter="context", budget=3)
    some = [(p, s, {"max_new_tokens": 8, "ignore_eos": True}) for p, s, _ in queries(4)]
    with serving(engine, max_batch_size=3, chunk=4) as pool:
        handles = submit(pool, some)
    assert [handle.result().tokens for handle in handles] == alone(engine, some)


# --- what was read serves others ----------------------------------------------------------------


def read_of(pool: Engine, prompt: list[int], **more: Any) -> int:
    return pool.submit(prompt, max_new_tokens=6, **more).result().report.cached_tokens


def test_a_prompt_is_read_from_where_it_parts_from_one_of_its_tenant(plain: Engine) -> None:
    common, others = tiny.prompt(40, seed=7), [tiny.prompt(9, seed=seed) for seed in (8, 9, 10)]
    prompts = [[*common, *other] for other in others]
    with serving(plain, max_batch_size=4, chunk=16) as pool:
        assert [read_of(pool, prompt, tenant="one") for prompt in prompts[:2]] == [0, 40]
        assert read_of(pool, prompts[2], tenant="two") == 0
        assert read_of(pool, prompts[2], tenant="one") == 40
        assert read_of(pool, prompts[2], tenant="one") == 48, "the last token is read for its law"
        handles = [pool.submit(p, max_new_tokens=6, tenant="one") for p in prompts]
        texts = [handle.result().tokens for handle in handles]
    assert texts == [plain.generate(p, max_new_tokens=6).tokens for p in prompts]


def test_a_prefix_of_another_tenant_is_noticed(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tiny.prompt(30, seed=3)
    longest = prefix_cache._longest

    def of_any(tokens: list[int], tenant: str, rows: Any) -> tuple[Any, int]:
        return max((longest(tokens, name, rows) for name in "ab"), key=lambda pair: pair[1])

    monkeypatch.setattr(prefix_cache, "_longest", of_any)
    with serving(plain, max_batch_size=3) as pool:
        assert [read_of(pool, prompt, tenant=name) for name in "ab"] == [0, 29]


TRUE_PREFIX, TRUE_SELECT = SequenceCache.prefix, TreeSession.select_rows
TRUE_PREFILL_JOIN = PrefillJob.join


def stale(self: SequenceCache, length: int, room: int) -> SequenceCache:
    """Leave the keys of another text."""
    other = TRUE_PREFIX(self, length, room)
    for keys, values in other.layers(length).values():
        keys.zero_(), values.zero_()
    return other


def unread(self: PrefillJob, session: Any) -> int:
    result = TRUE_PREFILL_JOIN(self, session)
    del self.left[: min(2, len(self.left) - 1)]
    return result


@pytest.mark.parametrize(
    "mutant",
    [
        (SequenceCache, "prefix", stale),
        (PrefillJob, "join", unread),
        (TreeSession, "select_rows", lambda self, rows: TRUE_SELECT(self, rows)[::-1]),
    ],
)
def test_what_is_wrong_with_the_cache_is_noticed(
    mutant: Any, plain: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(*mutant)
        with serving(plain, max_batch_size=3, chunk=16) as pool:
            handles = submit(pool, REQUESTS)
            results = [handle.future.exception() or handle.result().tokens for handle in handles]
    assert results != expected


class Copying(DraftSession):
    """Proposes what its text ends with; `known` is what it must not share."""

    def __init__(self) -> None:
        self.known: list[int] = []

    def propose(self, context: DraftContext, budget: int) -> DraftTree:
        new = context.tokens[len(self.known) :]
        assert self.known == context.tokens[: len(self.known)], "another text's"
        self.known += new
        return DraftTree.chain(context.tokens[-3:], "sampled")


class Sharing(Drafter):
    """A drafter whose sessions are one of their own for each text, or one for all."""

    name = "sampled"

    def __init__(self, shared: bool) -> None:
        self.session = Copying() if shared else None

    def open(self, request: DraftRequest) -> DraftSession:
        return self.session or Copying()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.filterwarnings("ignore:drafter 'sampled'")
def test_state_of_a_drafter_that_texts_share_is_noticed(
    shared: bool, target: CausalTarget, expected: list[list[int]]
) -> None:
    with Engine(target, tiny.tokenizer(), drafter=Sharing(shared), budget=4) as pool:
        results = [handle.result() for handle in submit(pool, REQUESTS)]
    assert [each.tokens for each in results] == expected, "a fault of a drafter changes no text"
    assert any(each.report.faults for each in results) == shared


# --- errors stay with whom they are of ----------------------------------------------------------


def failing(*arguments: Any) -> Any:
    raise RuntimeError("not today")


def third(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """Fail at the third of new tokens, as a processor or a criterion."""
    return failing() if ids.shape[1] >= 7 else scores if scores.numel() else False


FAILING: list[dict[str, Any]] = [{"on_step": failing}]
FAILING += [{"stopping_criteria": [each]} for each in (failing, third)]
FAILING += [{"logits_processor": [each]} for each in (failing, third)]


@pytest.mark.parametrize("options", FAILING)
@pytest.mark.parametrize("name", ["plain", "context"])
def test_a_request_that_fails_ends_alone(
    options: dict[str, Any], name: str, target: CausalTarget, expected: list[list[int]]
) -> None:
    with serving(engine_of(target, name), max_batch_size=4, chunk=16) as pool:
        handles = []
        for each in REQUESTS:
            handles += submit(pool, [each])
            failed = pool.submit([5, 6, 7, 8], max_new_tokens=9, **options)
        with pytest.raises(RuntimeError, match="not today"):
            failed.result()
        with pytest.raises(RuntimeError, match="not today"):
            tokens_of(failed)
        assert [handle.result().tokens for handle in handles] == expected
        assert pool.scheduler.live == pool.scheduler.waiting == 0


@pytest.mark.parametrize("broken", [(), ("leave", "discard_uncommitted")])
def test_a_broken_model_or_session_fails_its_texts_and_the_pool_goes_on(
    broken: tuple[str, ...], plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = plain.generate([4, 5, 6], max_new_tokens=4).tokens
    with serving(plain, max_batch_size=2) as pool:
        with monkeypatch.context() as patched:
            for name in broken:
                patched.setattr(TreeSession, name, failing)
            patched.setattr(CausalTarget, "forward", failing)
            for handle in [pool.submit([4, 5, 6], max_new_tokens=4) for _ in range(4)]:
                with pytest.raises(RuntimeError, match="not today"):
                    handle.result(timeout=20)
        assert pool.submit([4, 5, 6], max_new_tokens=4).result(timeout=20).tokens == whole


# --- memory that ends ---------------------------------------------------------------------------


class Scarce:
    """A forward for which there is memory for so many rows of text, and none now and then."""

    def __init__(self, rows: int, every: int) -> None:
        self.rows, self.every, self.count, self.failed = rows, every, 0, 0
        self.true = CausalTarget.forward

    def __call__(
        self, target: CausalTarget, tokens: torch.Tensor, batch: Any, keep: Any
    ) -> torch.Tensor:
        self.count += 1
        logits = self.true(target, tokens, batch, keep)  # what it wrote is half of a step
        rows = len(batch.rows)
        if rows > self.rows or (self.count % self.every == 0 and rows > 1):
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits


@pytest.mark.parametrize("name", ["plain", "context", "model"])
def test_where_memory_ends_a_row_is_put_back_and_no_text_changes(
    name: str, target: CausalTarget, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, scarce = engine_of(target, name), Scarce(2, 7)
    monkeypatch.setattr(CausalTarget, "forward", lambda *a: scarce(*a))
    with serving(engine, max_batch_size=5, chunk=16) as pool:
        results = [handle.result().tokens for handle in submit(pool, REQUESTS)]
    assert results == expected
    assert scarce.failed > 3


def test_rows_of_paths_are_read_again_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(PathTarget(build("qwen3_5_text")), drafter=None)
    some = [(p, s, {"max_new_tokens": 8, "ignore_eos": True}) for p, s, _ in queries(4)]
    texts = alone(engine, some)
    error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")
    scarce = failing_at(error, (3, 7), engine.model.forward)  # other rows are there
    monkeypatch.setattr(engine.model, "forward", scarce)
    with serving(engine, max_batch_size=3) as pool:
        assert [handle.result().tokens for handle in submit(pool, some)] == texts


def test_a_text_that_memory_does_not_hold_alone_fails(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(0, 99)
    monkeypatch.setattr(CausalTarget, "forward", lambda *a: scarce(*a))
    with serving(plain) as pool, pytest.raises(torch.OutOfMemoryError):
        pool.submit([4, 5, 6]).result()


# --- the queue and the end ----------------------------------------------------------------------


@pytest.fixture
def held(plain: Engine) -> Iterator[tuple[Engine, threading.Event]]:
    """Return a pool of one slot, whose text waits for the event, and room for one to wait."""
    go = threading.Event()
    with serving(plain, max_batch_size=1, max_queue_size=1) as pool:
        pool.submit([4, 5], max_new_tokens=2, ignore_eos=True, on_step=lambda *_: wait(go))
        yield pool, go
        go.set()


def wait(event: threading.Event) -> None:
    assert event.wait(20)


def test_the_end_of_a_text_that_is_closed_wakes_those_that_wait_for_it(
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


def test_a_full_queue_refuses(held: tuple[Engine, threading.Event]) -> None:
    pool, go = held
    waiting = pool.submit([4, 5, 6], max_new_tokens=2)
    with pytest.raises(QueueFullError, match="The queue holds"):
        pool.submit([7, 8])
    assert pool.scheduler.live + pool.scheduler.waiting == 2
    waiting.cancel()
    go.set()
    assert waiting.result().finish_reason == "cancelled" and waiting.result().tokens == []
    assert len(pool.submit([7, 8], max_new_tokens=3, ignore_eos=True).result().tokens) == 3


def test_a_closed_pool_refuses_and_has_drained(plain: Engine) -> None:
    pool = serving(plain, max_batch_size=2)
    handles = submit(pool, REQUESTS)
    pool.close()
    assert all(handle.done for handle in handles)
    assert {handle.result().finish_reason for handle in handles} <= {"stop", "length"}
    with pytest.raises(EngineClosedError, match="was closed"):
        pool.submit([1, 2])
    pool.close()


def test_closing_may_cancel_and_errors_do(plain: Engine) -> None:
    def endless(pool: Engine) -> list[RequestHandle]:
        slow: dict[str, Any] = {"max_new_tokens": 400, "on_step": lambda *_: time.sleep(0.01)}
        handles = [pool.submit([4, 5], ignore_eos=True, **slow) for _ in range(3)]
        next(handles[0])
        return handles

    pool = serving(plain, max_batch_size=2)
    handles = endless(pool)
    pool.close(timeout=0.01)
    with pytest.raises(KeyError), serving(plain, max_batch_size=2) as other:
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
        (([1],), {"tenant": 3}, "tenant is 3"),
        (([1] * 600,), {}, "context length is 512"),
        (([97],), {}, "97"),
    ],
)
def test_requests_are_checked_when_they_are_submitted(
    arguments: Any, options: dict[str, Any], match: str, plain: Engine
) -> None:
    with serving(plain) as pool:
        with pytest.raises(InputError, match=match):
            pool.submit(*arguments, **options)
        assert pool.scheduler.live + pool.scheduler.waiting == 0


@pytest.mark.parametrize("numbers", [{"max_batch_size": 0}, {"chunk": 0}, {"max_queue_size": -1}])
def test_numbers_out_of_range_are_refused(numbers: dict[str, int], plain: Engine) -> None:
    with pytest.raises(InputError, match="at least"):
        serving(plain, **numbers)


def test_engines_of_one_scheduler_serve_beside_each_other(
    plain: Engine, expected: list[list[int]]
) -> None:
    message = list[list[int]]()
    with serving(plain, max_batch_size=3) as pool:
        drafting = pool.with_drafter("context", 6)
        end = drafting.on_finish(lambda generation: message.append(generation.tokens))
        mixed = [
            (drafting if i % 2 else pool).submit(p, s, **o) for i, (p, s, o) in enumerate(REQUESTS)
        ]
    end()
    assert [handle.result().tokens for handle in mixed] == expected
    assert {handle.result().report.budget for handle in mixed[::2]} == {"none"}
    assert sorted(message) == sorted(expected[1::2])


def test_steps_are_reported_as_they_are_taken(plain: Engine) -> None:
    steps: list[Step] = []
    options: dict[str, Any] = {"ignore_eos": True, "on_step": lambda _, step: steps.append(step)}
    with serving(plain) as pool:
        handle = pool.submit("a tree", max_new_tokens=7, **options)
        tokens = tokens_of(handle)
    assert [token for step in steps for token in step.tokens] == tokens
    assert 0 < handle.submitted <= handle.joined <= handle.first <= handle.finished
    assert list(handle) == [] and handle.result(timeout=1).text == tiny.tokenizer().decode(tokens)


def test_a_watcher_of_a_handle_is_notified_of_its_end_and_released(plain: Engine) -> None:
    class Watcher(list[int]):
        def __call__(self) -> None:
            self.append(1)

    watchers = [Watcher(), Watcher()]
    with serving(plain, max_batch_size=1) as pool:
        handle = pool.submit([1, 2, 3], max_new_tokens=5, ignore_eos=True)
        handle.watch(watchers[0])
        pool.submit([1], max_new_tokens=1).result()
    handle.watch(watchers[1])
    steps = len(handle.result().steps)
    assert [*map(len, watchers)] == [steps + 1] * 2
    selected = [weakref.ref(each) for each in watchers]
    watchers.clear()
    assert [each() for each in selected] == [None, None]
    assert len(list(handle)) == steps


def test_who_watches_between_the_result_and_its_telling_is_reported(plain: Engine) -> None:
    message: list[int] = []
    with serving(plain, max_batch_size=1) as pool:
        handle = pool.submit([1, 2, 3], max_new_tokens=5, ignore_eos=True)
        handle.future.add_done_callback(lambda _: handle.watch(lambda: message.append(1)))
    assert len(message) == len(handle.result().steps) + 1


def test_a_handle_streams_text(plain: Engine) -> None:
    whole = plain.generate("a tree", max_new_tokens=16, ignore_eos=True).text
    stop = whole[9:11]
    with serving(plain, max_batch_size=2) as pool:
        handles = [
            pool.submit("a tree", max_new_tokens=16, ignore_eos=True, **more)
            for more in ({}, {"stop": stop}, {"stop_after": 5})
        ]
        texts = ["".join(handle.stream()) for handle in handles]
        early = pool.submit("a tree", max_new_tokens=400, ignore_eos=True)
        stream = early.stream()
        chunks = [next(stream), next(stream)]
        stream.cancel()
        chunks += list(stream)
        left = pool.submit("a tree", max_new_tokens=400, ignore_eos=True)
        for _ in left.stream():
            break
    assert texts == [whole, whole[: whole.find(stop)], whole[:5]]
    assert "".join(chunks) == early.result().text and len(early.result().tokens) < 400
    assert left.result().finish_reason == early.result().finish_reason == "cancelled"
    with Engine(plain.target, drafter=None) as pool, pytest.raises(InputError, match="no tok"):
        pool.submit([1], max_new_tokens=1).stream()


def test_a_device_that_stays_away_is_requested_by_callers_alone(
    target: CausalTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = Mock(side_effect=RuntimeError("the device is away"))
    pool = serving(engine_of(target, "plain"), max_batch_size=2)
    monkeypatch.setattr(Loop, "step", away)
    monkeypatch.setattr(type(target), "open", away)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="away"):
            pool.submit([1, 2, 3]).result(timeout=20)
    time.sleep(0.1)
    assert away.call_count == 3
    closing = threading.Thread(target=pool.close)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


# --- faults of callbacks, and calls beside each other -------------------------------------------


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, GeneratorExit, ValueError])
@pytest.mark.parametrize("place", ["on_step", "watch", "future", "on_finish"])
@pytest.mark.filterwarnings("ignore:a callback")
def test_a_callback_may_raise_anything_and_others_go_on(
    place: str, error: type[BaseException], plain: Engine, expected: list[list[int]]
) -> None:
    callback = Mock(side_effect=error("not today"))
    with serving(plain, max_batch_size=3, chunk=16) as pool:
        handles = submit(pool, REQUESTS[:4])
        options: dict[str, Any] = {"on_step": callback} if place == "on_step" else {}
        handle = pool.submit([5, 6, 7, 8], max_new_tokens=9, ignore_eos=True, **options)
        if place == "watch":
            handle.watch(callback)
        elif place == "future":
            handle.future.add_done_callback(callback)
        elif place == "on_finish":
            pool.on_finish(callback)
        if place in ("on_step", "watch"):
            with pytest.raises((CallbackError, ValueError), match="not today"):
                handle.result(timeout=20)
        else:
            assert len(handle.result(timeout=20).tokens) == 9
        handles += submit(pool, REQUESTS[4:])
        assert [each.result(timeout=20).tokens for each in handles] == expected


def test_a_call_within_a_step_is_refused_and_one_between_steps_is_served(plain: Engine) -> None:
    pool = serving(plain)
    whole = plain.generate([4, 5, 6], max_new_tokens=4).tokens

    def criterion(ids: Any, scores: Any) -> bool:
        pool.generate([4, 5, 6], max_new_tokens=4)
        return False

    with pytest.raises(InputError, match="in the middle of one of its own steps"):
        pool.generate([1, 2, 3], max_new_tokens=3, stopping_criteria=[criterion])
    texts: list[list[int]] = []

    def on_step(number: int, step: Step) -> None:
        texts.append(pool.generate([4, 5, 6], max_new_tokens=4).tokens)

    result = pool.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True, on_step=on_step)
    assert texts == [whole] * 3
    assert result.tokens == plain.generate([1, 2, 3], max_new_tokens=3, ignore_eos=True).tokens


def test_a_session_stays_open_while_it_is_held(plain: Engine) -> None:
    engine = serving(plain)
    with engine.scheduler.hold():
        engine.generate([1, 2], max_new_tokens=2)
        assert engine.scheduler.session is not None
    assert engine.scheduler.session is None


def test_a_thread_takes_the_steps_of_two_callers(plain: Engine) -> None:
    engine = serving(plain)
    requests, _ = engine.prepare([[1, 2], [3, 4]], None, {"max_new_tokens": 4})
    handles = [engine.add(request, object()) for request in requests]
    assert all(len(handle.future.result(timeout=30).tokens) == 4 for handle in handles)


def test_steps_may_be_taken_by_hand(
    plain: Engine, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, owner, handles = serving(plain, max_batch_size=3), object(), list[RequestHandle]()
    monkeypatch.setattr(plain.target, "piece", 8)
    for prompt, sampling, options in (REQUESTS[0], *REQUESTS[:3]):
        (request,), _ = pool.prepare(prompt, sampling, options)  # type: ignore[arg-type]
        handles.append(pool.add(request, owner))
    pool.step()
    handles[0].close()  # which began to read its prompt for both
    while pool.step():
        pass
    assert [each.result().tokens for each in handles[1:]] == expected[:3]
    assert handles[0].result().finish_reason == "cancelled"
