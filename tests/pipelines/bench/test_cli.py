"""`ragspec bench text` from end to end, on a tiny model in a folder."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from typer import BadParameter

from ragspec.errors import DocumentError, InputError, UnknownNameError
from ragspec.pipelines.bench.cli import main
from tests.support import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tiny")
    copy.deepcopy(tiny.model("llama")).save_pretrained(made)
    tiny.tokenizer().save_pretrained(made)
    rows = [{"id": i, "category": "qa", "prompt": f"ab ab {i}"} for i in range(3)]
    (made / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return made


def bench(folder: Path, *more: str) -> int:
    common = ["--model", str(folder), "--draft-model", "", "--budget", "4", "--device", "cpu"]
    return main(["text", *common, "--data", str(folder / "data.jsonl"), *more])


def test_a_run_prints_a_table_and_writes_both_files(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written, answers = tmp_path / "rows.json", tmp_path / "answers.jsonl"
    code = bench(
        folder,
        *("--modes", "hf-greedy,plain,context,fused", "--items", "2"),
        *("--json", str(written), "--spec-bench", str(answers)),
    )
    assert code == 0
    assert "hf-greedy" in capsys.readouterr().out
    document = json.loads(written.read_text(encoding="utf-8"))
    assert document["baseline"] == "hf-greedy"
    assert [row["mode"] for row in document["rows"]] == ["hf-greedy", "plain", "context"]
    assert all(row["items"] == 2 and row["equal_to_plain"] == 1.0 for row in document["rows"])
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    assert [line["model_id"] for line in lines] == ["context"] * 2  # the last that was run


@pytest.mark.parametrize("arguments", [["-h"], ["text", "-h"], ["store", "-h"]])
def test_help_has_a_short_name(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    assert "Usage: ragspec bench" in capsys.readouterr().out


def test_bad_data_and_unknown_modes_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="contxt"):
        bench(folder, "--modes", "contxt")
    for nothing in ("", "fused", "model,fused"):
        with pytest.raises(InputError, match="no mode is left"):
            bench(folder, "--modes", nothing)
    with pytest.raises(InputError, match="there is no folder"):
        bench(folder, "--json", str(tmp_path / "no" / "rows.json"))
    for option in ("--items", "--repeats"):
        with pytest.raises(BadParameter):
            bench(folder, option, "0")
    with pytest.raises(DocumentError, match="cannot be read"):
        bench(folder, "--data", str(tmp_path / "missing.jsonl"))
