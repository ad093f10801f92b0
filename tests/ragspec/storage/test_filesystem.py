from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest

from ragspec.errors import StoreError
from ragspec.storage.filesystem import read_file, reserve, unreadable, writer_lock

posix = pytest.mark.skipif(sys.platform == "win32", reason="no fork, no blocks")


@posix
@pytest.mark.parametrize("lacking", ["nothing", "the call", "the file system"])
def test_a_reserved_file_has_its_room_on_the_disk(
    tmp_path: Path, lacking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    if lacking == "the call":
        monkeypatch.delattr("os.posix_fallocate", raising=False)
    elif lacking == "the file system":
        monkeypatch.setattr("os.posix_fallocate", unsupported, raising=False)
    size = (1 << 20) + 3
    reserve(tmp_path / "x", size)
    assert (tmp_path / "x").read_bytes() == bytes(size)
    assert (tmp_path / "x").stat().st_blocks * 512 >= size
    reserve(tmp_path / "x", 0)
    assert (tmp_path / "x").read_bytes() == b""


def test_a_full_disk_is_reported_before_anything_is_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full, raising=False)
    with pytest.raises(StoreError, match=r"No space left on device.*takes 9 bytes; make room"):
        reserve(tmp_path / "x", 9)


def test_only_a_missing_file_asks_for_a_new_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing; build the store again"):
        read_file(tmp_path / "absent")
    with pytest.raises(StoreError, match="cannot be read") as on_progress:
        read_file(tmp_path)
    assert "build" not in str(on_progress.value)
    limits = str(unreadable(tmp_path, OSError(errno.EMFILE, "Too many open files")))
    assert "ulimit -n" in limits
    assert "build" not in limits


@posix
def test_the_lock_does_not_stay_with_a_process_forked_meanwhile(tmp_path: Path) -> None:
    waits, ends = os.pipe()
    with writer_lock(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(ends)
            os.read(waits, 1)
            os._exit(0)
    try:
        with writer_lock(tmp_path):
            pass
    finally:
        os.close(ends)
        os.close(waits)
        os.waitpid(child, 0)


@posix
def test_a_forked_process_does_not_release_the_lock_of_its_parent(tmp_path: Path) -> None:
    lock = writer_lock(tmp_path)
    with lock:
        child = os.fork()
        if child == 0:
            lock.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(StoreError, match="another process"), writer_lock(tmp_path):
            pass
