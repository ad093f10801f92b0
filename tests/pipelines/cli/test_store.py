import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.engine.engine import Engine
from ragspec.pipelines.cli import store as store_cli
from ragspec.pipelines.cli.app import main
from ragspec.retrievers.corpus.index import CorpusIndex
from tests.support import tiny
from tests.support.calls import failing, noted
from tests.support.command_line import Capture, output_of


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """Return a folder with documents, rows and things that cannot be read."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "a.txt").write_text("the cat sat on the mat")
    (folder / "b.jsonl").write_text('{"text": "one row"}\n\n{"text": "another row"}\n')
    (folder / "c.png").write_bytes(b"\x89PNG")
    return folder


def run(*arguments: str) -> int:
    return main(["store", *arguments])


@pytest.fixture
def store(texts: Path, tmp_path: Path, model: str) -> Path:
    """Return a store of the texts."""
    out = tmp_path / "c.store"
    assert run("build", str(texts), "-m", model, "-o", str(out)) == 0
    return out


def result(capsys: Capture, *arguments: str) -> dict[str, Any]:
    out, err = output_of(capsys, "store", *arguments, "--json")
    assert err == ""
    result: dict[str, Any] = json.loads(out)
    return result


def texts_of(path: Path, scope: str = "global") -> list[str]:
    decode = tiny.tokenizer().decode
    store = CorpusIndex.open(path, tokenizer=tiny.tokenizer())
    return [str(decode(d)) for segment in store.segments(scope) for d in segment.documents()]


def test_a_store_of_a_folder(texts: Path, tmp_path: Path, model: str, capsys: Capture) -> None:
    out = tmp_path / "c.store"
    text, noted = output_of(capsys, "store", "build", texts, "--model", model, "--out", out)
    assert "3 documents, 1 segment," in text
    assert "not read" in noted and "c.png" in noted
    (skipped,) = result(capsys, "build", str(texts), "--model", model, "--out", f"{out}2")[
        "skipped"
    ]
    assert skipped["path"].endswith("c.png") and skipped["reason"]
    assert texts_of(out) == ["the cat sat on the mat", "one row", "another row"]
    assert result(capsys, "verify", str(out))["sound"] is True
    info = result(capsys, "info", str(out))
    assert info["documents"] == 3 and info["scopes"] == {"global": info["tokens"]}
    assert info["model"] is None
    assert "is sound" in output_of(capsys, "store", "verify", out).out


def test_damage_ends_verify_with_code_8(store: Path, capsys: Capture) -> None:
    (path,) = store.glob("gen-*/seg-*/tokens.bin")
    path.write_bytes(bytes(len(path.read_bytes())))
    assert "SHA-256" in output_of(capsys, "store", "verify", store, code=8).err
    assert run("info", str(store)) == 0  # compares sizes only


def test_max_tokens_limits_the_store(tmp_path: Path, model: str, capsys: Capture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": "x" * 50}) + "\n" for _ in range(99)))
    out = str(tmp_path / "c.store")
    arguments = ["build", str(rows), "-m", model, "-o", out, "--max-tokens", "120"]
    assert result(capsys, *arguments, "-s", "field=body")["tokens"] == 120


def test_a_build_without_text_leaves_the_older_store(
    store: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    empty = tmp_path / "empty.jsonl"
    build = ["store", "build", str(empty), "-m", model, "-o", str(store), "--replace"]
    for rows, message in ("", "holds no rows"), ('{"text": null}\n', "no usable text"):
        empty.write_text(rows)
        assert message in output_of(capsys, *build, code=7).err
    assert len(texts_of(store)) == 3


def test_answers_are_stored_with_the_fingerprint_of_their_model(
    tmp_path: Path, model: str, capsys: Capture
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "m.store"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("ab ab", "cat", "x")))
    arguments = ["from-answers", str(prompts), "-m", model, "-o", str(out)]
    arguments += ["--max-new-tokens", "6", "-s", "batch=2", "-s", "dtype=float32"]
    first = result(capsys, *arguments)
    assert first["documents"] == 3
    assert first["model"] is not None
    engine = Engine(tiny.model(), tiny.tokenizer(), drafter=None)
    answers = engine.generate(["ab ab", "cat", "x"], max_new_tokens=6)
    decode = tiny.tokenizer().decode
    assert texts_of(out) == [decode(each.prompt_tokens + each.tokens) for each in answers]
    assert CorpusIndex.open(out, model=tiny.model()).info()["model"] == first["model"]
    prompts.write_text('{"prompt": "dog"}\n')
    assert result(capsys, *arguments)["documents"] == 4
    arguments[3] = tiny.save(tmp_path / "other", seed=1)
    assert "another model" in output_of(capsys, "store", *arguments, code=8).err


def test_only_replace_overwrites(texts: Path, tmp_path: Path, model: str, capsys: Capture) -> None:
    out = tmp_path / "c.store"
    CorpusIndex.build(["old"], tiny.tokenizer(), out, scope="acme").close()
    build = ["build", str(texts), "-m", model, "-o", str(out)]
    assert "is a store already" in output_of(capsys, "store", *build, code=2).err
    assert texts_of(out, "acme") == ["old"]
    assert run(*build, "--replace") == 0
    assert len(texts_of(out, "acme")) == 3


def test_documents_take_no_answers(
    store: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "ab"}\n')
    arguments = ["from-answers", tmp_path / "prompts.jsonl", "-m", model, "-o", store]
    err = output_of(capsys, "store", *arguments, "--max-new-tokens", "2", code=8).err
    assert "holds documents (" in err
    assert result(capsys, "info", str(store))["model"] is None
    assert len(texts_of(store)) == 3


def test_a_store_is_not_a_document(
    store: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    other = tmp_path / "b.store"
    message = output_of(capsys, "store", "build", store, "-m", model, "-o", other, code=7).err
    assert "is a store of text" in message and "--store" in message
    assert "ragspec ask --index" not in message


def test_a_prompt_that_is_too_long_is_left_out(tmp_path: Path, model: str, capsys: Capture) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("a b", "x" * 600)))
    arguments = ["from-answers", prompts, "-m", model, "-o", tmp_path / "m.store"]
    text, noted = output_of(capsys, "store", *arguments, "--max-new-tokens", "4")
    assert "1 document," in text and "left out: " in noted


def test_answers_are_flushed(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "m.store"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("ab", "cat", "x")))
    monkeypatch.setattr(store_cli, "FLUSH_SECONDS", 0.0)
    # An error without cleanup, like a kill.
    request, killed = list[Any](), failing(MemoryError, (3,), store_cli._answer)
    killed = noted(killed, request, lambda engine, first, *rest: first)
    arguments = ["from-answers", str(prompts), "-m", model, "-o", str(out), "-s", "batch=1"]
    with monkeypatch.context() as patch:
        patch.setattr(store_cli, "_answer", killed)
        with pytest.raises(MemoryError):
            run(*arguments, "--max-new-tokens", "3")
    assert len(texts_of(out)) == 2 and request == [["ab"], ["cat"], ["x"]]
