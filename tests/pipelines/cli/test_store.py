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

Capture = pytest.CaptureFixture[str]


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


def result(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code = run(*arguments, "--json")
    out, err = capsys.readouterr()
    assert code == 0, err
    assert err == ""
    result: dict[str, Any] = json.loads(out)
    return result


def held(path: Path, scope: str = "global") -> list[str]:
    decode = tiny.tokenizer().decode
    store = CorpusIndex.open(path, tokenizer=tiny.tokenizer())
    return [str(decode(d)) for segment in store.segments(scope) for d in segment.documents()]


def test_a_folder_is_built_and_looked_at(
    texts: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    out = tmp_path / "c.store"
    assert run("build", str(texts), "--model", model, "--out", str(out)) == 0
    text, noted = capsys.readouterr()
    assert "3 documents, 1 segment," in text
    assert "not read" in noted and "c.png" in noted
    assert held(out) == ["the cat sat on the mat", "one row", "another row"]
    assert result(capsys, "verify", str(out))["sound"] is True
    info = result(capsys, "info", str(out))
    assert info["documents"] == 3 and info["scopes"] == {"global": info["tokens"]}
    assert info["model"] is None
    assert run("verify", str(out)) == 0
    assert "is sound" in capsys.readouterr().out


def test_damage_ends_verify_with_code_8(
    texts: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    out = tmp_path / "c.store"
    assert run("build", str(texts), "-m", model, "-o", str(out)) == 0
    (path,) = out.glob("gen-*/seg-*/tokens.bin")
    path.write_bytes(bytes(len(path.read_bytes())))
    capsys.readouterr()
    assert run("verify", str(out)) == 8
    assert "SHA-256" in capsys.readouterr().err
    assert run("info", str(out)) == 0  # compares sizes only


def test_prefill_stops_at_the_limit(tmp_path: Path, model: str, capsys: Capture) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"body": "x" * 50}) + "\n" for _ in range(99)))
    out = str(tmp_path / "c.store")
    arguments = ["build", str(rows), "-m", model, "-o", out, "--max-tokens", "120"]
    assert result(capsys, *arguments, "-s", "field=body")["tokens"] == 120


def test_a_build_without_text_leaves_the_older_store(
    texts: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    out, empty = tmp_path / "c.store", tmp_path / "empty.jsonl"
    assert run("build", str(texts), "-m", model, "-o", str(out)) == 0
    for rows, message in ("", "holds no rows"), ('{"text": null}\n', "no usable text"):
        empty.write_text(rows)
        assert run("build", str(empty), "-m", model, "-o", str(out), "--replace") == 7
        assert message in capsys.readouterr().err
    assert len(held(out)) == 3


def test_answers_are_preserved_with_the_fingerprint_of_their_model(
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
    assert held(out) == [decode(each.prompt_tokens + each.tokens) for each in answers]
    assert CorpusIndex.open(out, model=tiny.model()).info()["model"] == first["model"]
    prompts.write_text('{"prompt": "dog"}\n')
    assert result(capsys, *arguments)["documents"] == 4
    other = tmp_path / "other"
    assert run("from-answers", str(prompts), "-m", tiny.save(other, seed=1), "-o", str(out)) == 8
    assert "another model" in capsys.readouterr().err


def test_a_store_is_replaced_on_request_alone(
    texts: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    out = tmp_path / "c.store"
    CorpusIndex.build(["old"], tiny.tokenizer(), out, scope="acme").close()
    build = ["build", str(texts), "-m", model, "-o", str(out)]
    assert run(*build) == 2
    assert "is a store already" in capsys.readouterr().err
    assert held(out, "acme") == ["old"]
    assert run(*build, "--replace") == 0
    assert len(held(out, "acme")) == 3


def test_documents_do_not_become_answers(
    texts: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "c.store"
    prompts.write_text('{"prompt": "ab"}\n')
    assert run("build", str(texts), "-m", model, "-o", str(out)) == 0
    arguments = ["from-answers", str(prompts), "-m", model, "-o", str(out)]
    assert run(*arguments, "--max-new-tokens", "2") == 8
    assert "holds documents (" in capsys.readouterr().err
    assert result(capsys, "info", str(out))["model"] is None
    assert len(held(out)) == 3


def test_a_store_is_no_source_of_documents(
    texts: Path, tmp_path: Path, model: str, capsys: Capture
) -> None:
    first, second = str(tmp_path / "a.store"), str(tmp_path / "b.store")
    assert run("build", str(texts), "-m", model, "-o", first) == 0
    capsys.readouterr()
    assert run("build", first, "-m", model, "-o", second) == 7
    message = capsys.readouterr().err
    assert "is a store of text" in message and "--store" in message
    assert "ragspec ask --index" not in message


def test_a_prompt_that_is_too_long_is_left_out(tmp_path: Path, model: str, capsys: Capture) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("a b", "x" * 600)))
    out = str(tmp_path / "m.store")
    code = run("from-answers", str(prompts), "-m", model, "-o", out, "--max-new-tokens", "4")
    text, noted = capsys.readouterr()
    assert code == 0
    assert "1 document," in text and "left out: " in noted


def test_answers_are_on_disk_every_minute(
    tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "m.store"
    prompts.write_text("".join(json.dumps({"prompt": p}) + "\n" for p in ("ab", "cat", "x")))
    monkeypatch.setattr(store_cli, "FLUSH_SECONDS", 0.0)
    # As good as a kill: nothing is tidied up on the way.
    request, killed = list[Any](), failing(MemoryError, (3,), store_cli._answer)
    killed = noted(killed, request, lambda engine, first, *rest: first)
    arguments = ["from-answers", str(prompts), "-m", model, "-o", str(out), "-s", "batch=1"]
    with monkeypatch.context() as patch:
        patch.setattr(store_cli, "_answer", killed)
        with pytest.raises(MemoryError):
            run(*arguments, "--max-new-tokens", "3")
    assert len(held(out)) == 2 and request == [["ab"], ["cat"], ["x"]]
