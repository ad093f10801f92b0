import json
import os
import shutil
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from ragspec.errors import InputError, StoreError
from ragspec.storage.filesystem import writer_lock
from ragspec.storage.manifest import Contents, sha256_file
from ragspec.storage.store import POINTER, OpenStore, carry, open_store, publish
from tests.support.calls import noted
from tests.support.damage import check_damage, check_kills


def write_text(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "data.txt").write_text(text)
        (folder / "inner").mkdir()
        (folder / "inner" / "more.txt").write_text(text * 2)

    return write


def build(root: Path, text: str) -> OpenStore:
    def write(folder: Path) -> Contents:
        write_text(text)(folder)
        return Contents({"n": 1}, {"model": "f"})

    return publish(root, "toy", write)


def read(root: Path) -> str:
    return open_store(root, "toy").file("data.txt").read_text()


def test_published_store_opens_with_its_files_and_parameters(tmp_path: Path) -> None:
    build(tmp_path / "s", "one")
    store = open_store(tmp_path / "s", "toy")
    assert store.manifest.fingerprints == {"model": "f"}
    assert store.file("inner/more.txt").read_text() == "oneone"
    assert store.manifest.parameters == {"n": 1}
    assert json.loads((store.path / "manifest.json").read_text())["format"] == 1
    with pytest.raises(StoreError, match=r"no file 'other\.txt'"):
        store.file("other.txt")
    with pytest.raises(StoreError, match="expected 'other'"):
        open_store(tmp_path / "s", "other")


def test_a_new_generation_replaces_the_old_and_open_readers_keep_theirs(tmp_path: Path) -> None:
    build(tmp_path, "one")
    reader = open_store(tmp_path, "toy")
    build(tmp_path, "two")
    assert read(tmp_path) == "two"
    assert reader.file("data.txt").read_text() == "one"
    build(tmp_path, "three")
    assert sorted(path.name for path in tmp_path.glob("gen-*")) == ["gen-000002", "gen-000003"]


def test_an_overtaken_reader_starts_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overtaken(path: Path) -> str:
        monkeypatch.undo()
        for text in ("two", "three"):
            build(tmp_path, text)
        return sha256_file(path)

    build(tmp_path, "one")
    monkeypatch.setattr("ragspec.storage.manifest.sha256_file", overtaken)
    assert read(tmp_path) == "three"


@pytest.mark.skipif(sys.platform == "win32", reason="no fork, no SIGKILL")
@pytest.mark.parametrize("before", [0, 2])
def test_a_killed_writer_leaves_the_old_store_or_the_new(tmp_path: Path, before: int) -> None:
    root = tmp_path / "s"
    root.mkdir()

    def write(root: Path) -> None:
        build(root, texts(root) + "+")

    def texts(root: Path) -> str:
        if (root / POINTER).exists():
            return read(root)
        with pytest.raises(StoreError, match="build it first"):
            read(root)
        return ""

    for _ in range(before):
        write(root)
    check_kills(root, tmp_path, write, texts)


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    build(tmp_path / "s", "some text")
    check_damage(tmp_path / "s", read, tmp_path, 90)


def test_files_swapped_between_stores_are_refused(tmp_path: Path) -> None:
    first, second = build(tmp_path / "a", "one"), build(tmp_path / "b", "two")
    (first.path / "data.txt").replace(second.path / "data.txt")
    open_store(tmp_path / "b", "toy", verify="size")
    with pytest.raises(StoreError, match="SHA-256"):
        open_store(tmp_path / "b", "toy")
    (second.path / "manifest.json").write_bytes((first.path / "manifest.json").read_bytes())
    with pytest.raises(StoreError, match="not the manifest"):
        open_store(tmp_path / "b", "toy", verify="size")


@pytest.mark.parametrize(
    "change",
    [
        lambda text: "",
        lambda text: text[:20],
        lambda text: text + " ",
        lambda text: "../x" + text[10:],
    ],
)
def test_damaged_pointer_is_refused(tmp_path: Path, change: Callable[[str], str]) -> None:
    build(tmp_path, "one")
    (tmp_path / POINTER).write_text(change((tmp_path / POINTER).read_text()))
    with pytest.raises(StoreError, match="CURRENT is damaged; make its folder again"):
        open_store(tmp_path, "toy")


def test_a_writer_that_misses_the_current_generation_deletes_nothing(tmp_path: Path) -> None:
    build(tmp_path, "one")
    shutil.rmtree(build(tmp_path, "two").path)
    with pytest.raises(StoreError, match="missing"):
        publish_with_carried_file(tmp_path, "three")
    assert (tmp_path / "gen-000001" / "data.txt").read_text() == "one"
    build(tmp_path, "four")
    assert read(tmp_path) == "four"


@pytest.mark.parametrize("pointer", [None, "MANIFEST-000002"])  # of a LevelDB
def test_a_folder_of_foreign_files_is_not_overwritten(tmp_path: Path, pointer: str | None) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    if pointer is not None:
        (tmp_path / "CURRENT").write_text(pointer)
    with pytest.raises(StoreError, match=r"thesis\.txt"):
        build(tmp_path, "one")
    with pytest.raises(StoreError, match="is a file"):
        build(tmp_path / "thesis.txt", "one")
    assert (tmp_path / "thesis.txt").read_text() == "mine"
    assert pointer is None or (tmp_path / "CURRENT").read_text() == pointer


def test_a_store_of_another_kind_is_not_overwritten(tmp_path: Path) -> None:
    publish(tmp_path, "toy", write_text("mine"))
    with pytest.raises(StoreError, match="holds 'toy', expected 'other'; name another store"):
        publish(tmp_path, "other", write_text("new"))
    assert (open_store(tmp_path, "toy").path / "data.txt").read_text() == "mine"
    (tmp_path / POINTER).write_text("damaged")
    publish(tmp_path, "other", write_text("new"))  # nothing whole is lost
    assert (open_store(tmp_path, "other").path / "data.txt").read_text() == "new"


def test_a_writer_waits_for_another_up_to_its_timeout(tmp_path: Path) -> None:
    build(tmp_path, "one")
    released = threading.Event()

    def hold() -> None:
        with writer_lock(tmp_path):
            held.set()
            released.wait(5)

    held = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(5)
    with pytest.raises(StoreError, match="another process"):
        publish(tmp_path, "toy", write_text("two"), wait=0.05)
    with pytest.raises(StoreError, match="another process"):
        build(tmp_path, "two")
    threading.Timer(0.1, released.set).start()
    publish(tmp_path, "toy", write_text("two"), wait=5)
    thread.join()
    assert read(tmp_path) == "two"


def publish_with_carried_file(root: Path, text: str) -> OpenStore:
    """Publish a generation with the last one's inner file and another data file."""

    def write(folder: Path) -> Contents:
        last = open_store(root, "toy", verify="size")
        (folder / "data.txt").write_text(text)
        return Contents({"n": 2}, {"model": "g"}, carry(last, ["inner/more.txt"], folder))

    return publish(root, "toy", write)


@pytest.mark.parametrize("links", [True, False])
def test_unchanged_files_are_carried_over(
    tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not links:
        monkeypatch.setattr("os.link", Mock(side_effect=OSError("no links here")))
    inode = build(tmp_path, "one").file("inner/more.txt").stat().st_ino
    for text in ("two", "three"):
        publish_with_carried_file(tmp_path, text)
    store = open_store(tmp_path, "toy")
    assert store.manifest.fingerprints == {"model": "g"}
    assert store.manifest.parameters == {"n": 2}
    assert store.file("data.txt").read_text() == "three"
    assert store.file("inner/more.txt").read_text() == "oneone"
    assert (store.file("inner/more.txt").stat().st_ino == inode) is links


def test_damage_to_a_carried_file_is_not_published(tmp_path: Path) -> None:
    build(tmp_path, "one").file("inner/more.txt").write_text("onetwo")
    publish_with_carried_file(tmp_path, "two")
    with pytest.raises(StoreError, match="SHA-256"):
        open_store(tmp_path, "toy")
    (tmp_path / "gen-000002" / "inner/more.txt").write_text("one")
    with pytest.raises(StoreError, match="truncated"):
        publish_with_carried_file(tmp_path, "three")
    (tmp_path / "gen-000002" / "inner/more.txt").unlink()
    with pytest.raises(StoreError, match="missing"):
        publish_with_carried_file(tmp_path, "three")


def test_a_generation_that_fails_leaves_the_one_before_or_no_folder(tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        (folder / "data.txt").write_text("half")
        raise InputError("no text")

    root = tmp_path / "new"
    with pytest.raises(InputError, match="no text"):
        publish(root, "toy", fail)
    assert not root.exists()
    build(root, "one")
    with pytest.raises(InputError, match="no text"):
        publish(root, "toy", fail)
    assert read(root) == "one"
    assert not list(root.glob(".build-*"))


@pytest.mark.parametrize("blocked", ["LOCK", "build"])
def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path, blocked: str) -> None:
    # Root can write to read-only folders, so a file or folder in the way stands for one.
    root = tmp_path / "s"
    root.mkdir()
    if blocked == "LOCK":
        (root / "LOCK").mkdir()
    else:
        (root / f".build-{os.getpid()}").write_bytes(b"")
    with pytest.raises(StoreError, match="cannot be written"):
        publish(root, "kind", lambda folder: None)


@pytest.mark.skipif(sys.platform == "win32", reason="folders cannot be flushed there")
def test_files_are_synced_before_a_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, int, int]] = []  # what was called, on which inode, of which size

    def of(path: int | Path, name: str = "fsync") -> tuple[str, int, int]:
        result = os.stat(path)
        return name, result.st_ino, result.st_size if stat.S_ISREG(result.st_mode) else 0

    for name in ("fsync", "rename", "replace"):
        watched = noted(getattr(os, name), calls, lambda path, *_, name=name: of(path, name))
        monkeypatch.setattr(os, name, watched)
    folder = build(tmp_path / "s", "one").path
    inner, manifest, root = folder / "inner", folder / "manifest.json", of(tmp_path / "s")
    data = {of(folder / "data.txt"), of(inner / "more.txt"), of(inner)}
    pointer = tmp_path / "s" / POINTER
    assert set(calls[:3]) == data, "the data as they are now, before a manifest speaks of them"
    renamed = [of(manifest), of(folder), of(folder, "rename"), root]
    assert calls[3:] == [*renamed, of(pointer), of(pointer, "replace"), root]
    calls.clear()
    first = open_store(tmp_path / "s", "toy")

    def more(target: Path) -> Contents:
        (target / "new.txt").write_text("new")
        return Contents({}, {}, carry(first, ["data.txt"], target))

    again = publish(tmp_path / "s", "toy", more).path
    assert of(again / "new.txt") in calls
    assert of(again / "data.txt") in calls
