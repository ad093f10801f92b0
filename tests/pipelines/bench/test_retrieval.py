"""`ragspec bench retrieval`: every case at toy size, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ragspec.pipelines.bench import retrieval
from ragspec.pipelines.cli.app import main
from tests.support import tiny

WORDS = ["walk", "tree", "draft", "token", "target", "rule", "keep", "node", "bird", "river"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    texts = [" ".join(WORDS[i % 7 :] + WORDS[: i % 5]) for i in range(24)]
    for name, key, rows in (
        ("passages", "text", texts),
        ("queries", "question", ["walk the tree?", "a bird by the river?", "paper song?"]),
    ):
        with gzip.open(folder / f"{name}.jsonl.gz", "wt", encoding="utf-8") as file:
            file.writelines(json.dumps({key: row}) + "\n" for row in rows)
    tiny.model(max_position_embeddings=2048).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    return folder


def run(data: Path, *more: str) -> int:
    return main(["bench", "retrieval", "--data", str(data), "--model", str(data / "model"), *more])


def test_every_case_gives_a_row(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("faiss")
    monkeypatch.setattr(retrieval, "FAR", 0.002)
    out = tmp_path / "rows.json"
    small = ("--questions", "2", "--tokens", "9", "--windows", "60", "--every", "4,3")
    assert run(data, *small, "--json", str(out)) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["case"] for row in rows] == [
        f"{case}, every {every}" for case in retrieval.CASES for every in (4, 3)
    ]
    for row in rows:
        assert row["equal"] == row["questions"] == 2
        assert row["ratio"] > 0 and row["predicted"] > 0 and row["stride_ms"] > 0
        assert float(row["search_ms"]["1"]) > 0


def test_answers_that_look_up_after_less_probable_tokens_stand_beside(
    data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "rows.json"
    small = ("--questions", "2", "--tokens", "12", "--cases", "bm25", "--flare", "0.5")
    assert run(data, *small, "--json", str(out)) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["seconds"].keys() == row["queries"].keys() == {"off", "auto", "flare"}
    assert 0 < row["queries"]["flare"] <= row["queries"]["auto"]


def test_windows_lie_in_their_documents() -> None:
    text = "one two  three\nfour five six seven"
    found = list(retrieval._windows(3, text, 2))
    assert [w.text.split()[0] for w in found] == ["one", "three", "five", "seven"]
    assert all(text[w.start : w.end] == w.text and w.document == 3 for w in found)


@pytest.mark.parametrize(
    ("more", "expected"),
    [(("--cases", "deep"), "unknown case 'deep'"), (("--cases", ","), "unknown case ''")],
)
def test_unknown_cases_are_refused(
    data: Path, more: tuple[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, *more) == 2
    assert expected in capsys.readouterr().err


def test_a_missing_folder_is_named(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", "retrieval", "--data", str(data / "nowhere")])
    assert code == 2
    assert "expected gzipped JSON lines in --data" in " ".join(capsys.readouterr().err.split())
