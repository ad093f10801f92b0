from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragspec.errors import StoreError
from ragspec.storage.manifest import FileRecord, Manifest, check_file, sha256_file


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


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"files": {"a": {"bytes": 1}}}', b"\xff"])
def test_what_is_no_manifest_is_refused(data: bytes) -> None:
    with pytest.raises(StoreError, match="no manifest"):
        Manifest.from_bytes(data, Path("m"))


def test_manifest_of_a_later_format_is_refused() -> None:
    raw = json.loads(Manifest("toy").to_bytes())
    raw["format"] = 99
    with pytest.raises(StoreError, match="format 99"):
        Manifest.from_bytes(json.dumps(raw).encode(), Path("m"))


def test_a_listed_file_outside_the_folder_is_refused(tmp_path: Path) -> None:
    outside = tmp_path / "secret"
    outside.write_text("x")
    (tmp_path / "gen").mkdir()
    record = FileRecord(1, sha256_file(outside))
    with pytest.raises(StoreError, match="missing"):
        check_file(tmp_path / "gen", "../secret", record, "full")


def test_a_file_that_goes_while_it_is_checked_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("x")
    record = FileRecord(1, sha256_file(tmp_path / "a"))

    def overtaken(path: Path) -> str:
        path.unlink()  # as a writer does with an old generation
        return sha256_file(path)

    monkeypatch.setattr("ragspec.storage.manifest.sha256_file", overtaken)
    with pytest.raises(StoreError, match="missing"):
        check_file(tmp_path, "a", record, "full")
