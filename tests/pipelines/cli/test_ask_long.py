"""`ragspec ask-long`, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.cli.app import main
from tests.support import tiny

Capture = pytest.CaptureFixture[str]
TEXT = "The walk keeps a token of the tree. The rule is kept by the target, word for word. " * 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny.model(max_position_embeddings=1024).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def report(tmp_path: Path) -> str:
    (tmp_path / "report.txt").write_text(TEXT)
    return str(tmp_path / "report.txt")


def said(capsys: Capture, *arguments: str) -> dict[str, Any]:
    capsys.readouterr()
    code = main(["ask-long", "What is kept?", *arguments, "--max-new-tokens", "20", "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    result: dict[str, Any] = json.loads(out)
    return result


def test_a_document_is_read_preserved_and_not_read_again(
    model: str, report: str, tmp_path: Path, capsys: Capture
) -> None:
    keep = str(tmp_path / "prefix_cache")
    first = said(capsys, "--doc", report, "--save-cache", keep, "--model", model)
    again = said(capsys, "--save-cache", keep, "--model", model, "--compare")
    assert first["answer"] == again["answer"] and again["compare"]["equal"]
    assert again["report"]["cached_tokens"] > 200
    assert again["passages"][0]["document"] == "report.txt"
    part = said(capsys, "--doc", report, "--token-range", "10:60", "--model", model)
    assert len(part["passages"][0]["text"]) < len(TEXT) // 2


@pytest.mark.parametrize("drafter", ["auto", "none", "rapid", "context,rapid"])
def test_modes_by_name(model: str, tmp_path: Path, drafter: str, capsys: Capture) -> None:
    parts = [f"Part {i} is about trees and so on. " * 4 for i in range(4)]
    (tmp_path / "parts.txt").write_text("\n\n".join([*parts, "A rule is kept by the target."]))
    inputs = ["--doc", str(tmp_path / "parts.txt"), "--model", model]
    inputs += ["--drafter", drafter, "--compare"]
    exact = said(capsys, *inputs)
    assert exact["compare"]["equal"] and exact["label"] == "exact"
    assert bool(exact["chunks"]) == ("rapid" in drafter)
    steered = said(capsys, *inputs, "--mode", "steered", "--eta", "30")
    assert steered["compare"]["equal"] and steered["label"] == "exact-for(RAPID, eta 30)"
    assert steered["chunks"] and steered["report"]["drift"] > 0.0
    assert steered["answer"] != exact["answer"]


def test_the_published_variant_and_a_model_that_reads_the_chunks(
    model: str, report: str, tmp_path: Path, capsys: Capture
) -> None:
    other = tmp_path / "other"
    tiny.model(seed=1).save_pretrained(other)
    tiny.tokenizer().save_pretrained(other)
    inputs = ["--doc", report, "--model", model, "--draft-model", str(other)]
    sampled = [*inputs, "--temperature", "1", "--seed", "3"]
    paper = said(capsys, *sampled, "--mode", "paper", "--eta", "20")
    assert paper["label"] == "approximate" and paper["report"]["tv_excess"] > 0.0
    assert paper["report"]["drafted_by_source"]["rapid"] > 0
    plain = said(capsys, *sampled, "--drafter", "rapid", "--compare")
    assert plain["compare"]["equal"] and plain["report"]["drafted_by_source"]["rapid"] > 0


def test_it_streams_and_says_what_it_preserved(
    model: str, report: str, tmp_path: Path, capsys: Capture
) -> None:
    keep = str(tmp_path / "prefix_cache")
    inputs = ["ask-long", "What?", "--doc", report, "--save-cache", keep, "--model", model]
    assert main([*inputs, "--max-new-tokens", "12"]) == 0
    out, err = capsys.readouterr()
    assert out.strip() and "saved in" in err


def test_what_cannot_be_is_said(model: str, report: str, tmp_path: Path, capsys: Capture) -> None:
    keep = str(tmp_path / "prefix_cache")
    base = ["ask-long", "What?", "--model", model, "--max-new-tokens", "5"]
    assert main([*base, "--doc", report, "--save-cache", keep, "--json"]) == 0
    capsys.readouterr()
    for more, message in (
        (["--doc", report, "--mode", "steerd"], "Did you mean 'steered'"),
        (["--doc", report, "--eta", "5"], "expected mode='steered'"),
        (["--doc", report, "--mode", "steered", "--eta", "-1"], "eta of 0 or more"),
        (["--doc", report, "--mode", "paper", "--drafter", "context"], "no other"),
        (["--doc", report, "--token-range", "five"], "Expected --token-range FROM:TO"),
        (["--doc", str(tmp_path)], "Invalid value"),
        (["--doc", report, "--save-cache", str(tmp_path)], "holds other files"),
        ([], "Expected --doc FILE"),
        (["--doc", report, "--save-cache", keep], "holds a saved document"),
        (["--doc", report, "--token-range", "0:5000000", "--save-cache", report], "is a file"),
    ):
        assert main([*base, *more]) != 0
        assert message in capsys.readouterr().err.replace("\n", " "), more
