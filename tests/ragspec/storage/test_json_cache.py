from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ragspec.storage import json_cache

KEY: json_cache.Key = {"model": "a", "threads": 2}
FIELDS = {"seconds": [0.5, 1.5], "why": "ä"}


def test_what_is_preserved_comes_back_under_its_key_alone(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    assert json_cache.read(folder, "cost", KEY) is None
    json_cache.write(folder, "cost", KEY, {"seconds": "replaced"})
    json_cache.write(folder, "cost", {"threads": 2, "model": "a"}, FIELDS)
    assert json_cache.read(folder, "cost", KEY) == FIELDS
    assert json_cache.read(str(folder), "cost", KEY) == FIELDS
    assert json_cache.read(folder, "probe", KEY) is None
    assert json_cache.read(folder, "cost", {**KEY, "threads": 3}) is None
    (file,) = folder.iterdir()
    assert file.name.startswith("cost-") and file.suffix == ".json"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"null", b"\xff\xfe\x00", b"{}"])
def test_damage_is_as_good_as_nothing(tmp_path: Path, damage: bytes) -> None:
    json_cache.write(tmp_path, "cost", KEY, FIELDS)
    (file,) = tmp_path.iterdir()
    file.write_bytes(damage)
    assert json_cache.read(tmp_path, "cost", KEY) is None
    json_cache.write(tmp_path, "cost", KEY, FIELDS)
    assert json_cache.read(tmp_path, "cost", KEY) == FIELDS
    assert list(tmp_path.iterdir()) == [file]


def test_a_file_of_another_key_is_not_believed(tmp_path: Path) -> None:
    json_cache.write(tmp_path, "cost", KEY, FIELDS)
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps({"key": {**KEY, "model": "b"}, **FIELDS}), encoding="utf-8")
    assert json_cache.read(tmp_path, "cost", KEY) is None


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    json_cache.write(tmp_path / "file", "cost", KEY, FIELDS)
    assert json_cache.read(tmp_path / "file", "cost", KEY) is None


def test_a_write_that_fails_leaves_what_was_there_and_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    json_cache.write(tmp_path, "cost", KEY, FIELDS)

    def full(*names: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    json_cache.write(tmp_path, "cost", KEY, {"seconds": []})
    assert json_cache.read(tmp_path, "cost", KEY) == FIELDS
    assert [file.suffix for file in tmp_path.iterdir()] == [".json"]
