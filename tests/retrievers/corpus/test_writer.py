import gc
import multiprocessing
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from ragspec.engine.engine import Engine
from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import SegmentSource
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.corpus.revision import Revision
from ragspec.storage.manifest import sha256_file
from tests.support import tiny
from tests.support.corpora import build, held, reopen, rows, text_of


@pytest.fixture
def store(tmp_path: Path) -> Iterator[CorpusIndex]:
    with build(tmp_path / "c.store", rows(3)) as instance:
        yield instance


def test_text_of_one_tenant_is_invisible_to_others(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tenants = ["a", "b", "global"]
    current: dict[str, list[list[int]]] = {name: [] for name in tenants}
    with build(tmp_path / "c", flush_tokens=40) as store:
        for _ in range(60):
            name = tenants[int(rng.integers(3))]
            row = [tenants.index(name), *rng.integers(3, 90, 6).tolist()]
            current[name].append(row)
            store.append(row, scope=name)
            for known, others in (("a", 1), ("b", 0), ("global", None)):
                firsts = {row[0] for row in text_of(store, known)}
                assert others not in firsts
                assert (known == "global") <= (firsts <= {2})
        for name in ("a", "b"):
            assert sorted(text_of(store, name)) == sorted(current["global"] + current[name])
        assert sorted(text_of(store)) == sorted(current["global"])
        assert sorted(text_of(store, "a stranger")) == sorted(current["global"])


def test_a_forgotten_scope_is_gone_from_the_disk(store: CorpusIndex) -> None:
    secret = [7] * 7
    store.append(secret, scope="tenant")
    store.flush()
    store.append(secret, scope="tenant")
    store.forget("tenant")
    assert text_of(store, "tenant") == rows(3)
    mark = np.array(secret, np.uint16).tobytes()
    assert not [p for p in store.path.rglob("tokens.bin") if mark in p.read_bytes()]


@pytest.mark.parametrize("scope", ["", " ", "request", None])
def test_invalid_scopes_are_refused(store: CorpusIndex, scope: Any) -> None:
    with pytest.raises(InputError, match="scope"):
        store.append([1], scope=scope)
    with pytest.raises(InputError, match="scope"):
        store.drafter(scope)


class Reader(threading.Thread):
    """Reads a corpus repeatedly and records errors and inconsistent snapshots.

    Generation g has 5 + g documents that begin with g, so a mixture of two is detected.
    """

    def __init__(self, store: CorpusIndex, done: threading.Event) -> None:
        super().__init__()
        self.store = store
        self.done = done
        self.known: set[int] = set()
        self.wrong: list[object] = []

    def run(self) -> None:
        while not self.done.wait(0.001):
            try:
                self.look()
            except Exception as error:
                self.wrong.append(error)

    def look(self) -> None:
        segments = self.store.segments()
        first = held(segments)
        numbers = {row[0] for row in first}
        self.known |= numbers
        if len(numbers) != 1 or len(first) != 5 + first[0][0] or held(segments) != first:
            self.wrong.append(first)


def test_readers_see_one_snapshot_each_during_twenty_swaps(tmp_path: Path) -> None:
    store = build(tmp_path / "c", [[0, 1, 2]] * 5)
    done = threading.Event()
    readers = [Reader(store, done) for _ in range(3)]
    for reader in readers:
        reader.start()
    for number in range(1, 21):
        documents = [np.array([number, 1, 2])] * (5 + number)

        def change(revision: Revision, documents: Any = documents) -> None:
            revision.drop(revision.catalogue.segments)
            revision.write(documents[:3], "global", SegmentSource.BUILT)
            revision.write(documents[3:], "global", SegmentSource.BUILT)

        store.change(change)
        time.sleep(0.01)  # for readers on a busy machine
    done.set()
    for reader in readers:
        reader.join()
        assert not reader.wrong
        assert len(reader.known) > 1
    assert {row[0] for row in text_of(store)} == {20}
    store.close()


def test_a_reader_sees_new_generations_on_refresh(store: CorpusIndex) -> None:
    reader = reopen(store.path)
    before = reader.segments()
    store.append([5, 6, 7], scope="global")
    store.flush()
    assert text_of(reader) == rows(3)
    assert reader.refresh()
    assert text_of(reader) == [*rows(3), [5, 6, 7]]
    assert reader.segments()[0] is before[0]  # not opened again
    assert not reader.refresh()
    assert held(before) == rows(3)
    reader.close()


def test_refresh_detects_damage_in_new_segments(store: CorpusIndex) -> None:
    reader = reopen(store.path)
    store.append([5, 6, 7], scope="global")
    store.flush()
    (path,) = store.path.glob("gen-000002/seg-000002/tokens.bin")
    path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(StoreError, match="SHA-256"):
        reader.refresh()
    assert text_of(reader) == rows(3)  # the older view stays open
    reader.close()


def test_a_reader_overtaken_by_two_writers_starts_again(
    store: CorpusIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Two writers replace the generation that is being read.
    overtakes = [lambda: store.forget("global"), lambda: store.change(lambda revision: None)]

    def hashed(path: Path) -> str:
        while overtakes:
            overtakes.pop(0)()
        return sha256_file(path)

    monkeypatch.setattr("ragspec.storage.manifest.sha256_file", hashed)
    assert text_of(reopen(store.path)) == []


@pytest.mark.parametrize("error", [OSError("too many open files"), KeyboardInterrupt()])
def test_text_is_written_once_if_the_view_cannot_open_after_a_flush(
    store: CorpusIndex, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append([4, 5, 6], scope="global")
    with monkeypatch.context() as patch:
        patch.setattr("ragspec.retrievers.corpus.index.open_view", Mock(side_effect=error))
        with pytest.raises(type(error)):
            store.flush()
    store.append([7, 8, 9], scope="global")
    store.close()
    assert text_of(reopen(store.path)) == [*rows(3), [4, 5, 6], [7, 8, 9]]


def test_close_releases_the_segments(store: CorpusIndex) -> None:
    segment = weakref.ref(store.segments()[0])
    store.close()
    gc.collect()
    assert segment() is None
    assert store.info()["tokens"] == 36


def _write_some(path: str, number: int) -> None:
    with CorpusIndex.open(path) as store:
        for _ in range(4):
            store.append([number] * 3, scope="global")
            store.flush()


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_concurrent_processes_write_in_turn(store: CorpusIndex) -> None:
    process = multiprocessing.get_context("fork").Process
    workers = [process(target=_write_some, args=(str(store.path), each)) for each in (11, 12)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
        assert worker.exitcode == 0
    store.refresh()
    assert sorted(text_of(store)) == sorted([*rows(3), *[[11] * 3] * 4, *[[12] * 3] * 4])


def test_answers_are_recorded_until_recording_stops(tmp_path: Path) -> None:
    engine = Engine(tiny.model(), tiny.tokenizer(), drafter=None)
    with CorpusIndex.build([], tiny.tokenizer(), tmp_path / "c") as store:
        stop = store.record(engine, scope="tenant-7", lead=2)
        first = engine.generate([[1, 2, 3, 4], [5, 6]], max_new_tokens=6)
        selection = [g.prompt_tokens[-2:] + g.tokens for g in first]
        assert text_of(store, "tenant-7") == selection
        assert text_of(store) == []
        stop()
        engine.generate([1, 2, 3], max_new_tokens=6)
        assert text_of(store, "tenant-7") == selection
        store.record(engine, scope="tenant-7", lead=0)
    engine.generate([1, 2, 3], max_new_tokens=6)  # closing ends recording
    again = CorpusIndex.open(tmp_path / "c", model=engine)
    assert text_of(again, "tenant-7") == selection
    for foreign, message in (
        (Engine(tiny.model(seed=1), tiny.tokenizer(), drafter=None), "another model"),
        (Engine(tiny.model(), tiny.bpe_tokenizer(), drafter=None), "another tokenizer"),
    ):
        with pytest.raises(StoreError, match=message):
            again.record(foreign, scope="tenant-7")


def test_a_stopped_recording_releases_the_engine(store: CorpusIndex) -> None:
    engine = Engine(tiny.model(), tiny.tokenizer(), drafter=None)
    selected = weakref.ref(engine)
    stop = store.record(engine, scope="global")
    stop()
    stop()
    del engine
    gc.collect()
    assert selected() is None
