"""`ragspec index`: built, grown, looked at, and never overwritten unasked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragspec.pipelines.cli.app import main
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.support.toy_embedder import make_embedder

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def instance(tmp_path: Path, capsys: Capture) -> tuple[str, Path, str]:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "pets.txt").write_text("The cat is a pet. The dog is an animal.\n")
    (folder / "photo.png").write_bytes(b"x")
    embedder = str(make_embedder(tmp_path / "embedder"))
    out = str(tmp_path / "pages.idx")
    assert main(["index", str(folder), "--out", out, "--embedder", embedder]) == 0
    err = capsys.readouterr().err
    assert "wrote 1 documents" in err and "photo.png" in err
    return out, folder, embedder


def test_an_index_is_replaced_only_when_reported(
    instance: tuple[str, Path, str], capsys: Capture
) -> None:
    out, folder, embedder = instance
    again = ["index", "build", str(folder), "--out", out, "--embedder", embedder]
    assert main(again) == 2
    err = capsys.readouterr().err
    assert "is an index already" in err and "--replace" in err and "ragspec index add" in err
    assert main([*again, "--replace"]) == 0


def test_documents_come_change_and_go(instance: tuple[str, Path, str], capsys: Capture) -> None:
    out, folder, _ = instance
    other = folder.parent / "rail.txt"
    other.write_text("The train has a wheel.")
    assert main(["index", "add", out, str(other)]) == 0
    assert "added 1: rail.txt\n1 documents unchanged" in capsys.readouterr().err
    (folder / "pets.txt").write_text("The cat sleeps.")
    assert main(["index", "refresh", out]) == 0
    assert "changed 1: pets.txt" in capsys.readouterr().err
    assert main(["index", "refresh", out]) == 0
    assert "nothing has changed" in capsys.readouterr().err
    assert main(["index", "remove", out, "rail.txt"]) == 0
    assert "removed 1: rail.txt" in capsys.readouterr().err
    assert [each.name for each in PassageIndex.open(out).documents] == ["pets.txt"]
    assert main(["index", "remove", out, "nothing.txt"]) == 2
    assert "no document of the index" in capsys.readouterr().err


def test_info_says_what_it_holds(instance: tuple[str, Path, str], capsys: Capture) -> None:
    out, folder, embedder = instance
    assert main(["index", "info", out]) == 0
    text = capsys.readouterr().out
    assert "1 documents in 1 passages of about 105 words" in text
    assert "meaning" in text and "words" in text and str(folder) in text
    assert main(["index", "info", out, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["documents"][0]["name"] == "pets.txt" and result["embedder"] == embedder
    assert result["paths"] == [str(folder)] and result["bytes"] > 100
    assert main(["index", "info", str(folder)]) != 0
    assert main(["index", "--help"]) == 0
    assert "refresh" in capsys.readouterr().out


def test_an_approximate_index_is_named_and_refreshed_as_such(
    instance: tuple[str, Path, str], capsys: Capture
) -> None:
    pytest.importorskip("faiss")
    out, folder, embedder = instance
    again = ["index", str(folder), "--out", out, "--embedder", embedder, "--replace"]
    assert main([*again, "--dense", "ivf"]) == 0
    assert main(["index", "info", out, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["dense"] == "ivf"
    (folder / "pets.txt").write_text("The cat sleeps.")
    assert main(["index", "refresh", out]) == 0
    dense = PassageIndex.open(out).dense
    assert dense is not None and dense.nearest.kind == "ivf"
    assert main([*again, "--dense", "flat"]) == 2
    assert "expected one of exact, hnsw, ivf" in capsys.readouterr().err
