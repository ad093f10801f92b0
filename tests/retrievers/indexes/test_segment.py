import errno
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.indexes import segment as module
from ragspec.retrievers.indexes.segment import FILES, DraftOptions, Segment, build_segment
from tests.support.spelling import spelled

VOCAB = 4
Text = list[int]
documents = st.lists(st.lists(st.integers(0, VOCAB - 1), max_size=20), max_size=6)


def test_no_look_up_goes_beyond_the_depth_of_the_sorting(tmp_path: Path) -> None:
    segment = build_segment(tmp_path, [[0, 1, 2]], VOCAB, depth=8)
    with pytest.raises(InputError, match="max_match is 16; expected 1 to 8"):
        segment.draft([0], 4)
    with pytest.raises(InputError, match="expected 1 to 8"):
        segment.longest_match([0], 9)
    options = DraftOptions(max_match=8)
    assert list(spelled(segment.draft([0], 4, options=options))) == [(1,), (1, 2)]
    assert len(segment.draft([0], 4, max_depth=0, options=options).tokens) == 0


@settings(max_examples=50)
@given(documents)
def test_documents_are_read_back_unchanged(texts: list[Text]) -> None:
    with TemporaryDirectory() as name:
        segment = build_segment(Path(name), iter(texts), VOCAB)
        assert [document.tolist() for document in segment.documents()] == texts
        assert segment.document_count == len(texts)
        assert len(segment) == sum(map(len, texts))


@pytest.mark.parametrize(("vocab", "width"), [(65_535, 2), (65_536, 4)])
def test_tokens_take_two_bytes_where_the_separator_fits(
    tmp_path: Path, vocab: int, width: int
) -> None:
    segment = build_segment(tmp_path, [[vocab - 1, 0], [vocab - 1, 1]], vocab)
    assert (tmp_path / FILES[0]).stat().st_size == width * (4 + 3)
    assert list(spelled(segment.draft([vocab - 1], 4))) == [(0,), (1,)]


def test_foreign_ids_are_refused(tmp_path: Path) -> None:
    for bad in ([0, VOCAB], [-1]):
        with pytest.raises(InputError, match="document 1 holds ids"):
            build_segment(tmp_path, [[1], bad], VOCAB)
    with pytest.raises(InputError, match="vocabulary 0"):
        build_segment(tmp_path, [], 0)


@pytest.mark.parametrize("file", FILES)
def test_missing_and_cut_files_are_refused(tmp_path: Path, file: str) -> None:
    build_segment(tmp_path, [[0, 1, 2]] * 5, VOCAB)
    data = (tmp_path / file).read_bytes()
    for content in (data[:-1], b"", data[: len(data) // 2], data * 2, None):
        (tmp_path / file).unlink()
        if content is not None:
            (tmp_path / file).write_bytes(content)
        with pytest.raises(StoreError, match=r"make (it|its folder) again"):
            Segment.open(tmp_path, VOCAB)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="no list of open files")
def test_small_segments_hold_no_files_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    segment = build_segment(tmp_path, [[0, 1, 2]] * 5, VOCAB)
    assert len(os.listdir("/proc/self/fd")) == before
    assert not segment.tokens.flags.writeable


def test_small_and_mapped_files_give_the_same_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = build_segment(tmp_path, [[0, 1, 2]] * 5, VOCAB)
    monkeypatch.setattr(module, "_SMALL", 0)
    mapped = Segment.open(tmp_path, VOCAB)
    assert isinstance(mapped.tokens.base, np.memmap)
    assert mapped.tokens.flags.writeable == small.tokens.flags.writeable
    for each in (mapped, small):
        assert list(spelled(each.draft([0], 5))) == [(1,), (1, 2)]


@pytest.mark.parametrize("small", [0, 1 << 20])
def test_the_error_for_too_many_open_files_names_ulimit(
    tmp_path: Path, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_segment(tmp_path, [[0, 1, 2]] * 5, VOCAB)
    refuse = Mock(side_effect=OSError(errno.EMFILE, "Too many open files"))
    monkeypatch.setattr(module, "_SMALL", small)
    monkeypatch.setattr(np, "fromfile" if small else "memmap", refuse)
    with pytest.raises(StoreError, match="ulimit -n"):
        Segment.open(tmp_path, VOCAB)


def test_another_vocabulary_is_refused(tmp_path: Path) -> None:
    build_segment(tmp_path, [[0, 1, 2]] * 5, VOCAB)
    with pytest.raises(StoreError, match=r"expected \(21, 15, 6, 6\)"):
        Segment.open(tmp_path, VOCAB + 1)


def test_an_empty_segment_drafts_nothing(tmp_path: Path) -> None:
    segment = build_segment(tmp_path, [], VOCAB)
    assert (len(segment), segment.document_count) == (0, 0)
    assert len(segment.draft([0, 1], 5).tokens) == 0
    segment.warm_up()
