"""Damage to every kind of file of a corpus: a typed error every time, never a crash or silence."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ragspec.errors import InputError, StoreError
from ragspec.retrievers.corpus.catalogue import BATCH, chunks, tokenized
from ragspec.retrievers.corpus.index import CorpusIndex
from tests.support import tiny
from tests.support.corpora import build, reopen, rows
from tests.support.damage import check_damage

KINDS = ("CURRENT", "manifest.json", "tokens.bin", "suffixes.bin", "buckets.bin", "starts.bin")
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
    check_damage(twins[0], reopen, tmp_path, TIMES, kind)


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
    store.append([1] * 5, scope="global")
    store.flush()
    newest = max((tmp_path / "c").glob("gen-*/seg-*/tokens.bin"), key=lambda path: path.parts[-3:])
    newest.write_bytes(bytes(len(newest.read_bytes())))
    store.append([1] * 5, scope="global")
    with pytest.raises(StoreError, match="SHA-256"):
        store.flush()
    assert not list((tmp_path / "c").glob(".build-*"))


KILLS = 50
# One process imports the library and forks a child for each kill. The child starts from a copy of
# the store, so that every kill meets the same two outcomes: the text before and the text after.
# A child that ended before its kill came does not count as killed: another one follows it.
SCRIPT = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
import numpy as np
from ragspec.retrievers.corpus.index import CorpusIndex
from ragspec.retrievers.corpus.catalogue import open_view
from ragspec.storage.store import BUILD_PREFIX

folder, kills = Path(sys.argv[1]), int(sys.argv[2])
rng = np.random.default_rng(0)
rows = [rng.integers(0, 90, 60).tolist() for _ in range(400)]

def build(path):
    CorpusIndex.build(rows[200:], None, path, vocab_size=97, segment_tokens=3000).close()

def seal(path):
    store = CorpusIndex.open(path)
    for row in rows[200:260]:
        store.append(row, scope="global")
    store.close()

def text(path):
    view = open_view(path, "full")
    return sorted(d.tolist() for s in view.segments for d in s.documents())

base = folder / "base"
store = CorpusIndex.build(rows[:100], None, base, vocab_size=97, segment_tokens=2000)
store.append(rows[100], scope="global")
store.flush()
store.append(rows[101], scope="tenant")
store.close()

draw = random.Random(7)
found = []
changes = [build, seal]
seconds, outcomes = {}, {}
for change in changes:
    path = folder / change.__name__
    shutil.copytree(base, path)
    began = time.perf_counter()
    change(path)
    seconds[change] = 1.2 * (time.perf_counter() - began)
    outcomes[change] = (text(base), text(path))
while sum(row[2] for row in found) < kills and len(found) < 4 * kills:
    change = changes[len(found) % len(changes)]
    path = folder / f"kill-{len(found)}"
    shutil.copytree(base, path)
    child = os.fork()
    if child == 0:
        try:
            change(path)
        finally:
            os._exit(0)
    time.sleep(draw.random() * seconds[change])
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    before, after = outcomes[change]
    left = text(path)
    verdict = "old" if left == before else "new" if left == after else "neither"
    killed = os.WIFSIGNALED(status)
    # A busy machine is slower at times: a writer that ended before its kill asks for a sooner one.
    seconds[change] *= 1.1 if killed else 0.8
    rubbish = list(path.glob(BUILD_PREFIX + "*"))
    seal(path)  # the next writer clears up and goes on
    whole = not list(path.glob(BUILD_PREFIX + "*")) and len(text(path)) == len(left) + 60
    found.append([change.__name__, verdict, killed, bool(rubbish), whole])
    shutil.rmtree(path)
print(json.dumps(found))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no SIGKILL")
def test_killed_at_random_moments_the_old_or_the_new_store_is_left(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(KILLS)],
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    killed = [row for row in result if row[2]]
    assert len(killed) == KILLS
    assert {verdict for _, verdict, *_ in result} == {"old", "new"}
    assert {verdict for _, verdict, hit, *_ in result if not hit} == {"new"}
    assert all(whole for *_, whole in result)
    assert any(rubbish for *_, rubbish, _ in killed)  # some are hit in the midst of their files


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


def test_chunks_end_with_whole_documents() -> None:
    rows = tokenized([[1] * 3, [2] * 3, [3] * 10, [4]], None)
    results = [[document.tolist() for document in piece] for piece in chunks(rows, 5)]
    assert results == [[[1] * 3, [2] * 3], [[3] * 10], [[4]]]


def test_what_is_no_text_is_refused() -> None:
    for wrong in (["text"], [[1.5]], [[[1]]]):
        with pytest.raises(InputError):
            list(tokenized(wrong, None))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="different lengths"):
        list(tokenized([[[1, 2], [3]]], None))  # type: ignore[list-item]


def test_half_a_surrogate_pair_is_no_reason_to_stop() -> None:
    tokenizer = tiny.bpe_tokenizer()
    results = [row.tolist() for row in tokenized(["fine", "broken \ud83d emoji"], tokenizer)]
    assert results == tokenizer(["fine", "broken \ufffd emoji"])["input_ids"]
