from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus import revision as corpus_revision
from ragspec.retrievers.corpus.catalogue import Catalogue, SegmentSource, read_catalogue
from ragspec.retrievers.corpus.revision import AppendBuffer, Revision, revise
from ragspec.retrievers.indexes.segment import Segment, build_segment, segment_in_memory
from ragspec.storage.manifest import Contents
from ragspec.storage.store import OpenStore, open_store, publish

CATALOGUE = Catalogue(vocab_size=1000, depth=8)
LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=25)


@pytest.fixture
def revision(tmp_path: Path) -> Revision:
    return Revision(tmp_path, None, CATALOGUE)


def texts(lengths: list[int]) -> list[np.ndarray]:
    return [np.full(length, number % 1000) for number, length in enumerate(lengths)]


def held(revision: Revision) -> list[list[int]]:
    records = revision.catalogue.segments
    return [d.tolist() for record in records for d in revision.documents(record)]


@given(LENGTHS, st.integers(0, 400))
@settings(max_examples=25)
def test_eviction_drops_the_oldest_and_no_more_than_it_must(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], selected: int
) -> None:
    revision = Revision(tmp_path_factory.mktemp("r"), None, CATALOGUE)
    documents = texts(lengths)
    for document in documents:
        revision.append([document], "a", largest=60)
    before = [record.tokens for record in revision.catalogue.segments]
    revision.evict(selected)
    left = held(revision)
    assert left == [document.tolist() for document in documents[len(documents) - len(left) :]]
    segments = revision.catalogue.segments
    assert sum(record.tokens for record in segments) <= selected
    if len(segments) < len(before):  # one more segment would exceed the limit
        assert sum(before[-len(segments) - 1 :]) > selected


def test_eviction_follows_append_order_also_after_merges(revision: Revision) -> None:
    for number, scope in enumerate("abbba"):
        revision.append([np.full(10, number)], scope, largest=20)
    revision.evict(20)
    assert held(revision) == [[0] * 10, [4] * 10]
    assert [record.scope for record in revision.catalogue.segments] == ["a"]
    names = {path.name for path in revision.folder.iterdir()}
    assert names == {record.name for record in revision.catalogue.segments}


def test_empty_text_makes_no_segment(revision: Revision) -> None:
    revision.write([np.empty(0, np.int64)], "a", SegmentSource.BUILT)
    assert not revision.catalogue.segments
    assert not list(revision.folder.iterdir())


def stored(root: Path, documents: list[np.ndarray]) -> OpenStore:
    def fill(revision: Revision) -> None:
        for document in documents:
            revision.write([document], "a", SegmentSource.BUILT)

    return revise(root, fill, new=CATALOGUE)


def test_unchanged_segments_are_hard_linked(tmp_path: Path) -> None:
    before = stored(tmp_path, texts([5, 6, 7]))
    after = revise(tmp_path, lambda r: r.drop([r.catalogue.segments[1]]))
    for name in ("seg-000001", "seg-000003"):
        old, new = (store.path / name / "tokens.bin" for store in (before, after))
        assert old.stat().st_ino == new.stat().st_ino
    assert [r.tokens for r in read_catalogue(after).segments] == [5, 7]
    revise(tmp_path, lambda r: r.append(texts([3]), "a"))
    names = [r.name for r in read_catalogue(open_store(tmp_path, "corpus")).segments]
    assert names == ["seg-000001", "seg-000003", "seg-000004"]  # no name is used twice


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"vocab_size": 9, "depth": 8, "serial": 1, "segments": [{}]},
        {"vocab_size": "x", "depth": 8, "serial": 1, "segments": []},
        {"vocab_size": 9, "depth": 8, "serial": 1, "segments": 3},
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    store = publish(tmp_path, "corpus", lambda folder: Contents(wrong))
    with pytest.raises(StoreError, match="build it again"):
        read_catalogue(store)


VOCAB, DEPTH = 20, 8
DOCUMENTS = st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9), max_size=9)


def text(log: AppendBuffer, scope: str = "a") -> list[list[int]]:
    return [d.tolist() for segment in log.segments(scope) for d in segment.documents()]


@given(DOCUMENTS)
@settings(max_examples=50)
def test_a_segment_in_memory_equals_the_one_on_disk(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]]
) -> None:
    there = build_segment(tmp_path_factory.mktemp("segment"), documents, VOCAB, depth=DEPTH)
    here = segment_in_memory(list(map(np.array, documents)), VOCAB, DEPTH)
    for name in ("tokens", "suffixes", "buckets", "starts"):
        mine, its = getattr(here, name), getattr(there, name)
        assert mine.dtype == its.dtype
        assert mine.flags.writeable is its.flags.writeable is False or not len(its)
        assert mine.tolist() == its.tolist()
    assert list(map(list, here.documents())) == documents


@given(st.lists(st.sampled_from("abldf"), max_size=60), st.integers(0, 2**16))
def test_every_document_is_visible_once_and_in_order(actions: list[str], seed: int) -> None:
    """Append, read, flush and forget in random order."""
    rng, log = np.random.default_rng(seed), AppendBuffer(VOCAB, DEPTH)
    held: dict[str, list[list[int]]] = {"a": [], "b": []}
    for number, action in enumerate(actions):
        if action in held:
            row = [number % VOCAB, *rng.integers(0, VOCAB, int(rng.integers(0, 20))).tolist()]
            log.append(row, action)
            held[action].append(row)
        elif action == "d":  # to disk
            batch = {s: [d.tolist() for d in ds] for s, ds in log.documents.items()}
            assert batch == {scope: rows for scope, rows in held.items() if rows}
            log.clear()
            held = {"a": [], "b": []}
        elif action == "l":
            assert text(log, "a") == held["a"]
        else:
            log.forget("b")
            held["b"] = []
        assert log.tokens == sum(len(row) + 1 for rows in held.values() for row in rows)
    assert text(log, "a") == held["a"]
    assert text(log, "b") == held["b"]


def test_each_token_is_sorted_a_few_times_only() -> None:
    log, seen, sorted_tokens = AppendBuffer(VOCAB, DEPTH), set[Segment](), 0
    for number in range(256):
        log.append([number % VOCAB] * 4, "a")
        segments = log.segments("a")
        sorted_tokens += sum(len(segment) for segment in segments if segment not in seen)
        seen |= {*segments}
        assert len(segments) <= 4  # the logarithm of 256 to the base of FACTOR
    assert sorted_tokens <= 8 * 256 * 4  # one segment for all would sort a token 128 times


def test_the_oldest_is_dropped_from_the_largest_scope() -> None:
    log = AppendBuffer(VOCAB, DEPTH)
    for number in range(10):
        log.append([number] * 4, "a")
    log.append([1, 2], "b")
    log.drop(30)
    assert log.dropped == 25
    assert text(log, "a") == [[number] * 4 for number in range(5, 10)]
    assert text(log, "b") == [[1, 2]]
    log.drop(0)
    assert log.tokens == 0
    assert log.dropped == 53


def test_rows_that_are_not_token_ids_are_refused() -> None:
    log = AppendBuffer(VOCAB, DEPTH)
    for wrong in ([VOCAB], [-1], [[1, 2]], [0.5], ["a"]):
        with pytest.raises(InputError):
            log.append(wrong, "a")  # type: ignore[arg-type]
    log.append([], "a")
    assert log.segments("a") == ()


def test_append_copies_the_array() -> None:
    log, row = AppendBuffer(VOCAB, DEPTH), np.array([1, 2, 3], np.int32)
    log.append(row, "a")
    row[:] = 9
    assert text(log) == [[1, 2, 3]]


def test_segments_of_recently_read_scopes_stay_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_revision, "MOST_TENANTS", 2)
    log = AppendBuffer(VOCAB, DEPTH)
    for scope in "abc":
        log.append([1, 2], scope)
    first = {scope: log.segments(scope)[0] for scope in "abc"}
    assert log.segments("c")[0] is first["c"]
    assert log.segments("b")[0] is first["b"]
    assert log.segments("a")[0] is not first["a"]
    assert text(log, "a") == [[1, 2]]
