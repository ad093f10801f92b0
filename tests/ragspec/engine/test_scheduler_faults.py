"""An error or a lack of memory affects no other text."""

import sys
import time
from contextlib import suppress
from types import FrameType
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ragspec import Engine
from ragspec.engine.loop import Loop
from ragspec.errors import CallbackError
from ragspec.verification.causal import CausalTarget
from ragspec.verification.path_rows import PathTarget
from ragspec.verification.tree_session import TreeSession
from tests.support import tiny
from tests.support.architectures import build
from tests.support.calls import failing as failing_at
from tests.support.scheduling import REQUESTS, alone, close, engine_of, queries, submit, tokens_of

CALLBACKS = ["on_step", "on_read", "logits_processor", "stopping_criteria"]


def failing(*arguments: Any) -> Any:
    raise RuntimeError("not today")


def third(ids: torch.Tensor, scores: torch.Tensor) -> Any:
    """Fail at the third new token, as a processor or a criterion."""
    return failing() if ids.shape[1] >= 7 else scores if scores.numel() else False


@pytest.mark.parametrize(
    "options", [{"on_step": failing}, {"stopping_criteria": [third]}, {"logits_processor": [third]}]
)
@pytest.mark.parametrize("name", ["plain", "context"])
def test_a_request_that_fails_ends_alone(
    options: dict[str, Any], name: str, target: CausalTarget, expected: list[list[int]]
) -> None:
    with engine_of(target, name).with_limits(4, chunk=16) as pool:
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
    with plain.with_limits(2) as pool:
        with monkeypatch.context() as patched:
            for name in broken:
                patched.setattr(TreeSession, name, failing)
            patched.setattr(CausalTarget, "forward", failing)
            for handle in [pool.submit([4, 5, 6], max_new_tokens=4) for _ in range(4)]:
                with pytest.raises(RuntimeError, match="not today"):
                    handle.result(timeout=20)
        assert pool.submit([4, 5, 6], max_new_tokens=4).result(timeout=20).tokens == whole


class Scarce:
    """A forward with memory for `rows` rows, which fails at each call number `every` too."""

    def __init__(self, rows: int, every: int) -> None:
        self.rows, self.every, self.count, self.failed = rows, every, 0, 0
        self.true = CausalTarget.forward

    def __call__(
        self, target: CausalTarget, tokens: torch.Tensor, batch: Any, keep: Any
    ) -> torch.Tensor:
        self.count += 1
        logits = self.true(target, tokens, batch, keep)  # it has written keys
        rows = len(batch.rows)
        if rows > self.rows or (self.count % self.every == 0 and rows > 1):
            self.failed += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return logits


@pytest.mark.parametrize("name", ["plain", "context", "model"])
def test_without_memory_a_row_is_put_back_and_no_text_changes(
    name: str, target: CausalTarget, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, scarce = engine_of(target, name), Scarce(2, 7)
    monkeypatch.setattr(CausalTarget, "forward", lambda *a: scarce(*a))
    with engine.with_limits(5, chunk=16) as pool:
        results = [handle.result().tokens for handle in submit(pool, REQUESTS)]
    assert results == expected
    assert scarce.failed > 3


def test_without_memory_rows_of_paths_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(PathTarget(build("qwen3_5_text")), drafter=None)
    some = [(p, s, {"max_new_tokens": 8, "ignore_eos": True}) for p, s, _ in queries(4)]
    texts = alone(engine, some)
    error = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate")
    scarce = failing_at(error, (3, 7), engine.model.forward)  # other rows are there
    monkeypatch.setattr(engine.model, "forward", scarce)
    with engine.with_limits(3) as pool:
        assert [handle.result().tokens for handle in submit(pool, some)] == texts


def test_a_text_that_exceeds_the_memory_alone_fails(
    plain: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = Scarce(0, 99)
    monkeypatch.setattr(CausalTarget, "forward", lambda *a: scarce(*a))
    with plain.with_limits(8) as pool, pytest.raises(torch.OutOfMemoryError):
        pool.submit([4, 5, 6]).result()


@pytest.mark.parametrize(
    "error",
    [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration, StopAsyncIteration, ValueError],
)
@pytest.mark.parametrize("place", [*CALLBACKS, "watch", "future", "on_finish"])
@pytest.mark.filterwarnings("ignore:a callback")
def test_a_callback_may_raise_anything_and_others_go_on(
    place: str, error: type[BaseException], plain: Engine, expected: list[list[int]]
) -> None:
    callback = Mock(side_effect=error("not today"), spec=[])  # without `of_row`
    value = callback if place.startswith("on_") else [callback]
    options: dict[str, Any] = {place: value} if place in CALLBACKS else {}
    with plain.with_limits(3, chunk=16) as pool:
        handles = submit(pool, REQUESTS[:4])
        handle = pool.submit(tiny.prompt(40), max_new_tokens=9, ignore_eos=True, **options)
        if place == "watch":
            handle.watch(callback)
        elif place == "future":
            handle.future.add_done_callback(callback)
        elif place == "on_finish":
            pool.on_finish(callback)
        if options or place == "watch":
            for take in (lambda: handle.result(timeout=20), lambda: list(handle.stream())):
                with pytest.raises((CallbackError, ValueError), match="not today"):
                    take()
        else:
            assert len(handle.result(timeout=20).tokens) == 9
        handles += submit(pool, REQUESTS[4:])
        assert [each.result(timeout=20).tokens for each in handles] == expected


@pytest.mark.parametrize("name", ["generate", "stream", "submit", "prefill"])
@pytest.mark.filterwarnings("ignore:a callback", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_interrupt_leaves_a_request_open(name: str, plain: Engine) -> None:
    prompts = [[1, 2], [3, 4]] if name == "generate" else [1, 2]
    options = {} if name == "prefill" else {"max_new_tokens": 2}
    modules = [f"ragspec.engine.{each}" for each in ("engine", "handle", "scheduler")]
    left, before = -1, 0

    def interrupt(frame: FrameType, event: str, _: object) -> None:
        nonlocal left
        left -= event in ("call", "return") and frame.f_globals.get("__name__") in modules
        if left < 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

    while left < 0:
        pool, left, before = plain.with_limits(8), before, before + 1
        sys.setprofile(interrupt)
        with suppress(KeyboardInterrupt):
            result = getattr(pool, name)(prompts, **options)
        sys.setprofile(None)
        assert left >= 0 or name == "submit" or not pool.scheduler.open_requests
        close(pool)
    assert before > 20, result


def test_only_callers_retry_a_device(target: CausalTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    away = Mock(side_effect=RuntimeError("the device is away"))
    pool = engine_of(target, "plain").with_limits(2)
    monkeypatch.setattr(Loop, "step", away)
    monkeypatch.setattr(type(target), "open", away)
    for _ in range(3):
        with pytest.raises(RuntimeError, match="away"):
            pool.submit([1, 2, 3]).result(timeout=20)
    time.sleep(0.1)
    assert away.call_count == 3
    close(pool)
