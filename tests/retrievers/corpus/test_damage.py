"""Damage to every kind of file of a corpus: a typed error every time, never a crash or silence."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.index import CorpusIndex
from tests.support.corpora import build, reopen, rows
from tests.support.damage import DAMAGES

KINDS = (
    "CURRENT",
    "manifest.json",
    "tokens.bin",
    "suffixes.bin",
    "buckets.bin",
    "starts.bin",
    "segment.json",
)
TIMES = 200


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two corpora of equal shape and different text, of two segments each."""
    folder = tmp_path_factory.mktemp("twins")
    for name, seed in (("a", 1), ("b", 2)):
        build(folder / name, rows(6, 20, seed), segment_tokens=60).close()
    return folder / "a", folder / "b"


def opens(path: Path) -> bool:
    """Say whether a corpus opens; anything but a StoreError passes through and fails the test."""
    try:
        store: CorpusIndex = reopen(path)
    except StoreError:
        return False
    store.close()
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused(twins: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    shutil.copytree(twins[0], tmp_path / "c")
    draw = random.Random(kind)
    paths = sorted((tmp_path / "c").rglob(kind))
    assert len(paths) == (1 if kind in ("CURRENT", "manifest.json") else 2)
    silent = []
    for number in range(TIMES):
        path = paths[number % len(paths)]
        whole = path.read_bytes()
        change = DAMAGES[draw.randrange(len(DAMAGES))]
        damaged = change(whole, draw)
        if damaged == whole:
            continue
        path.write_bytes(damaged)
        if opens(tmp_path / "c"):
            silent.append((path.name, change.__name__, damaged))
        path.write_bytes(whole)
    assert not silent
    assert opens(tmp_path / "c")


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_missing_or_swapped_are_refused(
    twins: tuple[Path, Path], kind: str, tmp_path: Path
) -> None:
    shutil.copytree(twins[0], tmp_path / "c")
    for path in sorted((tmp_path / "c").rglob(kind)):
        whole = path.read_bytes()
        path.unlink()
        assert not opens(tmp_path / "c")
        path.mkdir()
        assert not opens(tmp_path / "c")
        path.rmdir()
        others = [p for p in (*twins[0].rglob("*"), *twins[1].rglob("*")) if p.is_file()]
        for other in others:  # the same file of the twin, and any other file
            if other.name != "LOCK" and other.read_bytes() != whole:
                path.write_bytes(other.read_bytes())
                assert not opens(tmp_path / "c"), other
        path.write_bytes(whole)
    assert opens(tmp_path / "c")


def test_a_size_check_notices_what_has_another_size(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(twins[0], tmp_path / "c")
    (path,) = (tmp_path / "c").glob("gen-*/seg-000001/tokens.bin")
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(StoreError, match="truncated"):
        reopen(tmp_path / "c", verify="size")
    path.write_bytes(bytes(len(whole)))
    reopen(tmp_path / "c", verify="size").close()  # as documented
    with pytest.raises(StoreError, match="SHA-256"):
        reopen(tmp_path / "c")
    with pytest.raises(InputError, match="expected 'full' or 'size'"):
        reopen(tmp_path / "c", verify="often")


def test_damaged_text_is_not_merged_into_a_sound_segment(
    twins: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(twins[0], tmp_path / "c")
    store = reopen(tmp_path / "c")
    (path,) = (tmp_path / "c").glob("gen-*/seg-000001/tokens.bin")
    path.write_bytes(bytes(len(path.read_bytes())))
    with pytest.raises(StoreError, match="SHA-256"):
        store.merge()
    assert not list((tmp_path / "c").glob(".build-*"))
