from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import StoreError
from ragspec.retrievers.corpus.catalogue import Catalogue, Source, read_catalogue
from ragspec.retrievers.corpus.revision import FACTOR, Revision, create, revise
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


@given(LENGTHS)
@settings(max_examples=15)
def test_appending_keeps_order_and_geometric_sizes(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    revision = Revision(tmp_path_factory.mktemp("r"), None, CATALOGUE)
    documents = texts(lengths)
    for document in documents:
        revision.append([document], "a")
        sizes = [record.tokens for record in revision.catalogue.segments]
        assert all(old >= FACTOR * new for old, new in pairwise(sizes))
    assert held(revision) == [document.tolist() for document in documents]
    names = {path.name for path in revision.folder.iterdir()}
    assert names == {record.name for record in revision.catalogue.segments}


@given(LENGTHS, st.integers(0, 400), st.booleans())
@settings(max_examples=25)
def test_eviction_drops_the_oldest_and_no_more_than_it_must(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], selected: int, whole: bool
) -> None:
    revision = Revision(tmp_path_factory.mktemp("r"), None, CATALOGUE)
    documents = texts(lengths)
    for document in documents:
        revision.append([document], "a", largest=60)
    revision.evict(selected, revision.catalogue.segments, whole=whole)
    left = held(revision)
    assert left == [document.tolist() for document in documents[len(documents) - len(left) :]]
    tokens = revision.catalogue.tokens
    assert tokens <= selected
    if len(left) < len(documents):  # one document more was too much, or it is much all the same
        assert tokens + lengths[len(lengths) - len(left) - 1] > selected or (
            whole and 2 * tokens >= selected
        )


def test_a_segment_larger_than_the_limit_is_cut(revision: Revision) -> None:
    revision.append(texts([10] * 15), "a")
    revision.evict(100, revision.catalogue.segments, whole=True)
    assert revision.catalogue.tokens == 100
    revision.evict(99, revision.catalogue.segments, whole=False)
    revision.evict(50, revision.catalogue.segments, whole=True)
    assert held(revision) == [text.tolist() for text in texts([10] * 15)[10:]]


def test_what_was_appended_last_goes_last_whatever_it_is_merged_with(revision: Revision) -> None:
    for number, scope in enumerate("abbba"):
        revision.append([np.full(10, number)], scope, largest=20)
    revision.evict(20, revision.catalogue.segments, whole=True)
    assert held(revision) == [[0] * 10, [4] * 10]
    assert [record.scope for record in revision.catalogue.segments] == ["a"]


def test_a_merge_has_the_age_of_its_newest_part(revision: Revision) -> None:
    for number, scope in enumerate("aba"):
        revision.put((), revision.build([np.full(5, number)], scope, Source.BUILT))
    revision.merge()
    assert held(revision) == [[1] * 5, [0] * 5, [2] * 5]


def test_no_segment_grows_beyond_the_largest(revision: Revision) -> None:
    for document in texts([20] * 30):
        revision.append([document], "a", largest=100)
    assert max(record.tokens for record in revision.catalogue.segments) <= 100
    before = len(revision.catalogue.segments)
    revision.merge(largest=200)
    assert max(record.tokens for record in revision.catalogue.segments) <= 200
    assert len(revision.catalogue.segments) <= before / 2 + 1
    assert len(held(revision)) == 30


def test_scopes_and_sources_are_not_merged_with_each_other(revision: Revision) -> None:
    one, two, three, four = texts([5, 5, 5, 5])
    revision.put((), revision.build([one], "a", Source.BUILT))
    revision.append([two], "a")
    revision.append([three], "b")
    revision.append([four], "a")
    revision.merge()
    results = [(r.scope, r.source.value, r.documents) for r in revision.catalogue.segments]
    assert results == [("a", "built", 1), ("b", "appended", 1), ("a", "appended", 2)]


def test_empty_text_makes_no_segment(revision: Revision) -> None:
    assert revision.build([np.empty(0, np.int64)], "a", Source.BUILT) is None
    assert not list(revision.folder.iterdir())


def stored(root: Path, documents: list[np.ndarray]) -> OpenStore:
    def fill(revision: Revision) -> None:
        for document in documents:
            revision.put((), revision.build([document], "a", Source.BUILT))

    return create(root, CATALOGUE, fill)


def test_what_a_change_leaves_alone_is_not_written_again(tmp_path: Path) -> None:
    before = stored(tmp_path, texts([5, 6, 7]))
    after = revise(tmp_path, lambda r: r.put([r.catalogue.segments[1]], None))
    for name in ("seg-000001", "seg-000003"):
        old, new = (store.path / name / "tokens.bin" for store in (before, after))
        assert old.stat().st_ino == new.stat().st_ino
    assert [r.tokens for r in read_catalogue(after).segments] == [5, 7]
    revise(tmp_path, lambda r: r.append(texts([3]), "a"))
    names = [r.name for r in read_catalogue(open_store(tmp_path, "corpus")).segments]
    assert names == ["seg-000001", "seg-000003", "seg-000004"]  # no name is given twice


def test_a_change_that_fails_leaves_everything(tmp_path: Path) -> None:
    stored(tmp_path, texts([5]))

    def fail(revision: Revision) -> None:
        revision.append(texts([3]), "a")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        revise(tmp_path, fail)
    assert read_catalogue(open_store(tmp_path, "corpus")).tokens == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"vocab_size": 9, "depth": 8, "serial": 1, "segments": [{}]},
        {"vocab_size": "x", "depth": 8, "serial": 1, "segments": []},
        {"vocab_size": 9, "depth": 8, "serial": 1, "segments": 3},
    ],
)
def test_a_manifest_that_describes_no_corpus_is_refused(
    tmp_path: Path, wrong: dict[str, object]
) -> None:
    nothing: Callable[[Path], None] = lambda folder: None  # noqa: E731
    store = publish(tmp_path, "corpus", nothing, parameters=wrong)
    with pytest.raises(StoreError, match="build it again"):
        read_catalogue(store)
