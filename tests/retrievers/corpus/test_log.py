from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError
from ragspec.retrievers.corpus import log as corpus_log
from ragspec.retrievers.corpus.log import AppendLog, segment_in_memory
from ragspec.retrievers.indexes.segment import Segment, build_segment

VOCAB, DEPTH = 20, 8
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), max_size=9)


def make() -> AppendLog:
    return AppendLog(VOCAB, DEPTH)


def text(log: AppendLog, scope: str = "a") -> list[list[int]]:
    return [d.tolist() for segment in log.segments(scope) for d in segment.documents()]


@given(DOCUMENTS)
@settings(max_examples=50)
def test_a_segment_in_memory_is_the_one_that_would_be_on_disk(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    folder = tmp_path_factory.mktemp("segment")
    build_segment(folder, documents, VOCAB, depth=DEPTH)
    there = Segment.open(folder)
    here = segment_in_memory(list(map(np.array, documents)), VOCAB, DEPTH)
    assert here.sizes == there.sizes
    for name in ("tokens", "suffixes", "starts"):
        mine, its = getattr(here, name), getattr(there, name)
        assert mine.dtype == its.dtype
        assert mine.flags.writeable is its.flags.writeable is False or not len(its)
        assert mine.tolist() == its.tolist()
    assert list(map(list, here.documents())) == documents


@given(st.lists(st.sampled_from("abltdgf"), max_size=60), st.integers(0, 2**16))
def test_every_document_is_visible_once_and_in_order(actions: list[str], seed: int) -> None:
    """Whatever is appended, looked at, taken, done, given back or forgotten."""
    rng = np.random.default_rng(seed)
    log = make()
    held: dict[str, list[list[int]]] = {"a": [], "b": []}
    out: dict[str, list[list[int]]] | None = None
    for number, action in enumerate(actions):
        if action in held:
            row = [number % VOCAB, *rng.integers(0, VOCAB, int(rng.integers(0, 20))).tolist()]
            log.append(row, action)
            held[action].append(row)
        elif action == "t" and out is None:
            batch = log.take()
            assert {s: [d.tolist() for d in ds] for s, ds in batch.items()} == {
                s: ds for s, ds in held.items() if ds
            }
            out = {scope: list(rows) for scope, rows in held.items()}
            out = out if batch else None
        elif action in "dg" and out is not None:
            if action == "d":
                log.done()
                held = {scope: rows[len(out[scope]) :] for scope, rows in held.items()}
            else:
                log.give_back()
            out = None
        elif action == "l":
            assert text(log, "a") == held["a"]
        elif action == "f" and out is None:
            log.forget("b")
            held["b"] = []
        assert log.tokens == sum(len(row) + 1 for rows in held.values() for row in rows)
    assert text(log, "a") == held["a"]
    assert text(log, "b") == held["b"]


def test_segments_are_few_and_rebuilt_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    log, sorted_tokens = make(), 0
    instance = segment_in_memory

    def counting(documents: list[np.ndarray], *rest: object) -> Segment:
        nonlocal sorted_tokens
        sorted_tokens += sum(map(len, documents))
        return instance(documents, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(corpus_log, "segment_in_memory", counting)
    most = 0
    for _ in range(512):
        log.append([1, 2, 3, 4], "a")
        most = max(most, len(log.segments("a")))
    assert most <= 5  # log base 4 of 512, and one
    assert sorted_tokens < 512 * 4 * 16
    assert log.segments("a")[0] is log.segments("a")[0]


def test_a_batch_must_come_back_before_the_next() -> None:
    log = make()
    log.append([1], "a")
    log.take()
    with pytest.raises(RuntimeError, match="batch is out"):
        log.take()


def test_the_oldest_is_dropped_from_the_largest_scope() -> None:
    log = make()
    for number in range(10):
        log.append([number] * 4, "a")
    log.append([1, 2], "b")
    assert log.drop(30) == 25
    assert text(log, "a") == [[number] * 4 for number in range(5, 10)]
    assert text(log, "b") == [[1, 2]]
    assert log.drop(0) == 28
    assert log.tokens == 0
    assert log.dropped == 53


def test_rows_that_are_no_tokens_are_refused() -> None:
    log = make()
    for wrong in ([VOCAB], [-1], [[1, 2]], [0.5], ["a"]):
        with pytest.raises(InputError):
            log.append(wrong, "a")  # type: ignore[arg-type]
    assert log.append([], "a") == 0
    assert log.segments("a") == ()


def test_the_caller_keeps_its_array() -> None:
    log, row = make(), np.array([1, 2, 3], np.int32)
    log.append(row, "a")
    row[:] = 9
    assert text(log) == [[1, 2, 3]]


def test_memory_is_preserved_for_the_scopes_visible_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_log, "MOST_TENANTS", 2)
    log = make()
    for scope in "abc":
        log.append([1, 2], scope)
    first = {scope: log.segments(scope)[0] for scope in "abc"}
    assert log.segments("c")[0] is first["c"]
    assert log.segments("b")[0] is first["b"]
    assert log.segments("a")[0] is not first["a"]
    assert text(log, "a") == [[1, 2]]
