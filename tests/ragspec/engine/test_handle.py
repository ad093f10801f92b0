"""The handle of a request: its steps, its result, its callbacks, and what it releases."""

import asyncio
import subprocess
import sys
import weakref
from queue import SimpleQueue
from typing import Any

import pytest

from ragspec import Engine
from ragspec.engine.handle import RequestHandle
from ragspec.errors import InputError, ResultTimeoutError
from ragspec.rules.base import Step
from tests.support import tiny
from tests.support.scheduling import tokens_of
from tests.support.waiting import until


def test_steps_are_reported_as_they_are_taken(plain: Engine) -> None:
    steps: list[Step] = []
    options: dict[str, Any] = {"ignore_eos": True, "on_step": lambda _, step: steps.append(step)}
    with plain.with_limits(8) as pool:
        handle = pool.submit("a tree", max_new_tokens=7, **options)
        tokens = tokens_of(handle)
    assert [token for step in steps for token in step.tokens] == tokens
    assert 0 < handle.submitted <= handle.joined <= handle.first <= handle.finished
    assert list(handle) == [] and handle.result(timeout=1).text == tiny.tokenizer().decode(tokens)


def test_a_timeout_of_result_leaves_the_text_running(plain: Engine) -> None:
    with plain.with_limits(8) as pool:
        handle = pool.submit("a tree", max_new_tokens=200, ignore_eos=True)
        with pytest.raises(ResultTimeoutError, match="has not ended in 0 s; wait, or cancel"):
            handle.result(timeout=0)
        assert len(handle.result().tokens) == 200


def test_the_interpreter_exits_cleanly_while_texts_are_written() -> None:
    code = (
        "from ragspec import Engine\n"
        "engine = Engine.from_pretrained('starter', drafter=None)\n"
        "handles = [engine.submit('A', max_new_tokens=400, ignore_eos=True) for _ in range(3)]\n"
        "next(handles[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_cancelled_await_ends_the_text(plain: Engine) -> None:
    async def impatient(handle: RequestHandle) -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(handle.future), 0)

    with plain.with_limits(1) as pool:
        handle = pool.submit("a tree", max_new_tokens=400, ignore_eos=True)
        asyncio.run(impatient(handle))
        assert handle.result().finish_reason == "cancelled"


def test_a_watcher_of_a_handle_is_notified_of_its_end_and_released(plain: Engine) -> None:
    class Watcher(list[int]):
        def __call__(self) -> None:
            self.append(1)

    watchers = [Watcher(), Watcher()]
    with plain.with_limits(1) as pool:
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


def test_a_watcher_added_after_the_result_is_notified(plain: Engine) -> None:
    message: list[int] = []
    with plain.with_limits(1) as pool:
        handle = pool.submit([1, 2, 3], max_new_tokens=5, ignore_eos=True)
        handle.future.add_done_callback(lambda _: handle.watch(lambda: message.append(1)))
    assert len(message) == len(handle.result().steps) + 1


def test_a_handle_streams_text(plain: Engine) -> None:
    whole = plain.generate("a tree", max_new_tokens=16, ignore_eos=True).text
    stop = whole[9:11]
    with plain.with_limits(2) as pool:
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


@pytest.mark.parametrize("place", ["on_step", "future", "on_finish"])
def test_a_callback_may_wait_for_other_texts(place: str, plain: Engine) -> None:
    pool, texts = plain.with_limits(8), list[list[int]]()
    other = pool.without_callbacks()

    def callback(*_: object) -> None:
        texts.append(other.submit([4, 5, 6], max_new_tokens=3).result().tokens)
        texts.append(tokens_of(other.submit([4, 5, 6], max_new_tokens=3)))

    if place == "on_finish":
        pool.on_finish(callback)
    handle = pool.submit([1, 2], max_new_tokens=1, on_step=callback if place == "on_step" else None)
    if place == "future":
        handle.future.add_done_callback(callback)
    until(lambda: handle.done and len(texts) == 2)
    assert texts == [plain.generate([4, 5, 6], max_new_tokens=3).tokens] * 2


def test_a_callback_that_waits_for_its_text_or_within_a_step_is_refused(plain: Engine) -> None:
    pool, handles = plain.with_limits(8), SimpleQueue[RequestHandle]()
    calls: list[Any] = [lambda *_: handles.get().result(), lambda *_: pool.submit([1]).result()]
    handle = pool.submit([1, 2], max_new_tokens=3, on_step=calls[0])
    handles.put(handle)
    with pytest.raises(InputError, match="waits for its text"):
        handle.future.result(timeout=20)
    with pytest.raises(InputError, match="in the middle of one of its own steps"):
        pool.generate([3], logits_processor=calls[1:])
