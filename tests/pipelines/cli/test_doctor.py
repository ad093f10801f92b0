from __future__ import annotations

import json
from pathlib import Path

import pytest

import ragspec
from ragspec.budget.cost_curve import cached
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.doctor import REQUIRED, examine, show
from ragspec.pipelines.console.terminal import Terminal


def keep_a_curve(folder: Path) -> None:
    key = {"model": "tiny-model", "device": "cpu here", "dtype": "torch.float32"}
    cached(folder, key, lambda rows, length: 0.002 * rows, (16,))


def test_findings_are_json_and_name_what_is_there(tmp_path: Path) -> None:
    keep_a_curve(tmp_path)
    result = json.loads(json.dumps(examine(["./no-such-model"], tmp_path)))
    assert result["ragspec"] == ragspec.__version__
    assert result["packages"]["torch"] and not result["missing"]
    assert result["packages"].keys() >= {"transformers", "faiss-cpu"}
    assert "accelerate" in REQUIRED
    assert result["device"]["type"] and result["device"]["threads"] >= 1
    names = [model["name"] for model in result["models"]]
    assert {"starter", "starter-draft", "./no-such-model"} <= set(names)
    absent = result["models"][names.index("./no-such-model")]
    assert absent["folder"] is None and "path:" in absent["tried"][0]
    assert [entry["key"]["model"] for entry in result["costs"]] == ["tiny-model"]


def test_a_model_that_is_there_is_detected_by_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    result = examine([str(folder)], tmp_path)["models"][-1]
    assert (result["origin"], result["folder"]) == ("path", str(folder))


def test_tables_show_the_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep_a_curve(tmp_path)
    result = examine([], tmp_path)
    show(result, Terminal())
    result["missing"], result["costs"] = ["torch"], []
    show(result, Terminal())
    out = capsys.readouterr().out
    for part in ("This machine", "Packages", "starter-draft", "Cost of a forward", "cpu here"):
        assert part in out
    assert "Missing: torch" in out


def test_command_prints_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["python"]
