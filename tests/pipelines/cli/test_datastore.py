"""`ragspec datastore` and `generate --datastore`, as a user types them."""

import shutil
from pathlib import Path

import pytest

from ragspec.pipelines.cli.app import main
from tests.support.command_line import Capture, output_of, run


@pytest.fixture(scope="module")
def store(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "a.txt").write_text("The tree holds what the walk keeps, and the walk goes on. " * 3)
    (folder / "b.jsonl").write_text('{"text": "one row of it"}\n{"text": "another row"}\n')
    (folder / "c.png").write_bytes(b"\x89PNG")
    out = str(folder.parent / "knn")
    assert main(["datastore", "build", str(folder), "--model", model, "--out", out]) == 0
    return out


def test_info_counts_keys_and_documents(store: str, capsys: Capture) -> None:
    result = run(capsys, "datastore", "info", store)
    assert result["documents"] == 3 and result["width"] == 64
    assert result["keys"] > 100 and result["model"]
    out = output_of(capsys, "datastore", "info", store).out
    assert f"{result['keys']:,} keys of 64 numbers" in out.replace("\n", " ")


def test_verify_detects_a_changed_byte(store: str, tmp_path: Path, capsys: Capture) -> None:
    assert run(capsys, "store", "verify", store)["kind"] == "datastore"
    shutil.copytree(store, tmp_path / "damaged")
    damaged = next((tmp_path / "damaged").rglob("keys.bin"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    for command in (["store", "verify"], ["generate", "The tree", "--datastore"]):
        assert "SHA-256" in output_of(capsys, *command, tmp_path / "damaged", code=8).err


def test_max_tokens_and_replace(model: str, tmp_path: Path, capsys: Capture) -> None:
    text = tmp_path / "a.txt"
    text.write_text("words and more words " * 20)
    build = ("datastore", "build", str(text), "--model", model, "--out", str(tmp_path / "knn"))
    assert run(capsys, *build, "--max-tokens", "50")["keys"] == 50
    assert "is a store already" in output_of(capsys, *build, code=2).err
    assert run(capsys, *build, "--replace")["keys"] > 50


def test_guesses_do_not_change_the_mixture(store: str, model: str, capsys: Capture) -> None:
    inputs = ("generate", "The tree", "--model", model, "--max-new-tokens", "30", "--seed", "2")
    mixed = (*inputs, "-t", "0.9", "--datastore", store, "-s", "knn=8", "-s", "knn-weight=0.5")
    result = run(capsys, *mixed, "--compare")
    assert result["label"] == "exact-for(knn)" and result["compare"]["equal"]
    assert result["report"]["retrieval"]["strides"] == result["report"]["tokens"]
    off = run(capsys, *mixed, "-s", "speculate=off")
    guessed = run(capsys, *mixed, "-s", "speculate=3", "--drafter", "none")
    assert off["text"] == guessed["text"] == result["text"]
    assert guessed["report"]["retrieval"]["hits"] > 0
    assert run(capsys, *inputs, "-t", "0.9")["text"] != result["text"]


def test_the_mixture_streams_and_refuses_large_settings(
    store: str, model: str, capsys: Capture
) -> None:
    inputs = ["generate", "The tree", "--model", model, "--datastore", store, "-s"]
    out, err = output_of(capsys, *inputs, "knn=8", "--max-new-tokens", "20")
    assert out.strip() and "Looked up" in err.replace("\n", " ")
    for setting, message in (("knn=99999", "k is 99999"), ("speculate=99", "speculate is 99")):
        assert message in output_of(capsys, *inputs, setting, code=2).err.replace("\n", " ")
