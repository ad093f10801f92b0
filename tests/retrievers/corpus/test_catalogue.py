"""Damage to every kind of file of a corpus raises StoreError; texts and ids become rows."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import BATCH, chunks, tokenized
from tests.support import tiny
from tests.support.corpora import build, reopen, rows, text_of
from tests.support.damage import check_damage, check_kills

KINDS = ("CURRENT", "manifest.json", "tokens.bin", "suffixes.bin", "buckets.bin", "starts.bin")
TIMES = 200


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two corpora of equal shape and different text, of two segments each."""
    folder = tmp_path_factory.mktemp("twins")
    for name, seed in (("a", 1), ("b", 2)):
        build(folder / name, rows(6, 20, seed), segment_tokens=60).close()
    return folder / "a", folder / "b"


@pytest.mark.parametrize("kind", KINDS)
def test_damage_is_refused(twins: tuple[Path, Path], kind: str, tmp_path: Path) -> None:
    check_damage(twins[0], reopen, tmp_path, TIMES, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_folders_and_swapped_files_are_refused(
    twins: tuple[Path, Path], kind: str, tmp_path: Path
) -> None:
    shutil.copytree(twins[0], tmp_path / "c")
    for path in sorted((tmp_path / "c").rglob(kind)):
        whole = path.read_bytes()
        path.unlink()
        path.mkdir()
        with pytest.raises(StoreError):
            reopen(tmp_path / "c")
        path.rmdir()
        others = [p for p in (*twins[0].rglob("*"), *twins[1].rglob("*")) if p.is_file()]
        for other in others:  # the same file of the twin, and any other file
            if other.name != "LOCK" and other.read_bytes() != whole:
                path.write_bytes(other.read_bytes())
                with pytest.raises(StoreError):
                    reopen(tmp_path / "c")
        path.write_bytes(whole)
    reopen(tmp_path / "c").close()


def test_a_size_check_detects_truncation_only(twins: tuple[Path, Path], tmp_path: Path) -> None:
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
    store.append([1] * 5, scope="global")
    store.flush()
    newest = max((tmp_path / "c").glob("gen-*/seg-*/tokens.bin"), key=lambda path: path.parts[-3:])
    newest.write_bytes(bytes(newest.stat().st_size))
    store.append([1] * 5, scope="global")
    with pytest.raises(StoreError, match="SHA-256"):
        store.flush()
    assert not list((tmp_path / "c").glob(".build-*"))


def append(path: Path) -> None:
    with reopen(path) as store:
        store.append([1, 2, 3], scope="global")


@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no SIGKILL")
@pytest.mark.parametrize("write", [lambda path: build(path, rows(3, seed=3)).close(), append])
def test_a_killed_writer_leaves_the_old_corpus_or_the_new(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    def text(path: Path) -> list[list[int]]:
        with reopen(path) as store:
            return text_of(store)

    build(tmp_path / "c", rows(2)).close()
    check_kills(tmp_path / "c", tmp_path, write, text)


def test_texts_and_rows_come_in_order_and_as_a_stream() -> None:
    tokenizer, read = tiny.tokenizer(), 0
    message: list[tuple[int, int]] = []

    def stream() -> Iterator[str | list[int]]:
        nonlocal read
        for number in range(2 * BATCH + 3):
            read += 1
            yield "ab" if number % 2 else [number % 90]

    rows = tokenized(stream(), tokenizer, lambda d, t: message.append((d, t)))
    assert [next(rows).tolist() for _ in range(3)] == [[0], tokenizer("ab")["input_ids"], [2]]
    assert read == BATCH
    assert len(list(rows)) == 2 * BATCH
    assert [d for d, _ in message] == [BATCH, 2 * BATCH, 2 * BATCH + 3]
    assert message[-1][1] == 2 * BATCH + 3 + (2 * BATCH + 3) // 2


def test_no_special_tokens_and_no_warning_for_long_texts(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    (row,) = tokenized(["a" * 600], tiny.tokenizer())  # its longest model input is 512
    assert row.tolist() == [ord("a") - 32] * 600
    assert not caplog.text and not capsys.readouterr().err


def test_rows_may_be_read_by_number() -> None:
    rows: Any = type("Rows", (), {"__getitem__": lambda self, number: [[1], [2, 3]][number]})()
    assert [row.tolist() for row in tokenized(rows, None)] == [[1], [2, 3]]


def test_chunks_end_with_whole_documents() -> None:
    rows = tokenized([[1] * 3, [2] * 3, [3] * 10, [4]], None)
    results = [[document.tolist() for document in piece] for piece in chunks(rows, 5)]
    assert results == [[[1] * 3, [2] * 3], [[3] * 10], [[4]]]


def test_documents_that_are_not_text_or_ids_are_refused() -> None:
    wrong: dict[str, Any] = {
        "got 'text'; expected a list": "text",
        "no tokenizer": ["text"],
        "type float64": [[1.5]],
        "shape .1, 1.": [[[1]]],
        "different lengths": [[[1, 2], [3]]],
    }
    for message, documents in wrong.items():
        with pytest.raises(InputError, match=message):
            list(tokenized(documents, None))


def test_lone_surrogates_are_replaced() -> None:
    tokenizer = tiny.bpe_tokenizer()
    results = [row.tolist() for row in tokenized(["fine", "broken \ud83d emoji"], tokenizer)]
    assert results == tokenizer(["fine", "broken \ufffd emoji"])["input_ids"]
