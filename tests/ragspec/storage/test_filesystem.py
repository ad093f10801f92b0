import errno
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import InputError, MissingModelError, StoreError
from ragspec.models.resolve import resolve_model
from ragspec.storage.filesystem import cache_directory, read_file, unreadable, writer_lock
from ragspec.storage.manifest import FileRecord, Manifest, check_file, sha256_file

posix = pytest.mark.skipif(sys.platform == "win32", reason="no fork")


def test_only_a_missing_file_asks_for_a_new_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing; make its folder again"):
        read_file(tmp_path / "absent")
    with pytest.raises(StoreError, match="cannot be read") as on_progress:
        read_file(tmp_path)
    assert "build" not in str(on_progress.value)
    limits = str(unreadable(tmp_path, OSError(errno.EMFILE, "Too many open files")))
    assert "ulimit -n" in limits
    assert "build" not in limits


@posix
def test_a_forked_child_does_not_hold_the_lock(tmp_path: Path) -> None:
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


@given(
    st.dictionaries(st.text(), st.integers() | st.text() | st.booleans()),
    st.dictionaries(st.text(), st.text()),
)
def test_manifest_survives_the_disk(
    parameters: dict[str, int | str], fingerprints: dict[str, str]
) -> None:
    manifest = Manifest("toy", dict(parameters), fingerprints, {"a/b": FileRecord(3, "00")})
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data, Path("m")) == manifest
    assert Manifest.from_bytes(data, Path("m")).to_bytes() == data


LATER = Manifest("toy", format=99).to_bytes()


@pytest.mark.parametrize("data", [b"", b"[]", b'{"files": {"a": {"bytes": 1}}}', b"\xff", LATER])
def test_invalid_manifests_are_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="format 99" if data == LATER else "no manifest"):
        Manifest.from_bytes(data, Path("m"))


def test_a_listed_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("x")
    (tmp_path / "gen").mkdir()
    record = FileRecord(1, sha256_file(outside))
    with pytest.raises(StoreError, match="missing"):
        check_file(tmp_path / "gen", "../secret", record, "full")


@posix
def test_a_user_without_a_home_has_a_private_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platformdirs.user_cache_path", Mock(side_effect=RuntimeError))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = cache_directory()
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert cache_directory() == folder
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="private folder of this user"):
        cache_directory()
    with pytest.raises(MissingModelError, match="~nobody-here/m does not exist"):
        resolve_model("~nobody-here/m")
