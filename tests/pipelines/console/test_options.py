import copy
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ragspec.drafters.fuse import within
from ragspec.errors import InputError, ModelError, SamplingError
from ragspec.pipelines.cli.store import load_tokenizer
from ragspec.pipelines.console import terminal
from ragspec.pipelines.console.options import (
    EngineOptions,
    OutputOptions,
    SamplingOptions,
    SearchOptions,
    StoreOptions,
    TextOptions,
    number_or_name,
)
from ragspec.pipelines.console.records import split
from ragspec.pipelines.console.terminal import Terminal, printable
from ragspec.retrievers import CorpusIndex, RestDrafter
from ragspec.sampling.settings import Sampling
from tests.support import tiny
from tests.support.toy_gguf import write_gguf


def test_lists_and_numbers_are_parsed() -> None:
    assert list(map(split, ("", "context", "a, b,"))) == [(), ("context",), ("a", "b")]
    assert number_or_name("12") == 12
    assert number_or_name("auto") == "auto"


def test_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    copy.deepcopy(tiny.model("llama")).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="holds no tokenizer"):
        EngineOptions("cpu", model=str(tmp_path), drafter="none").load_engine()


def test_a_gguf_file_has_a_tokenizer(tmp_path: Path) -> None:
    write_gguf(tmp_path / "toy.gguf")
    assert load_tokenizer(str(tmp_path / "toy.gguf"))("ab")["input_ids"]
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ModelError, match="bare holds no tokenizer; expected"):
        load_tokenizer(str(tmp_path / "bare"))


def test_documents_are_counted_while_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("The cat sleeps.")
    monkeypatch.setattr(terminal, "LOG_SECONDS", 0.0)
    SearchOptions([tmp_path / "a.txt"]).open(Terminal())
    assert "embedding passages: 0 of 1" in capsys.readouterr().err


def test_static_selects_steps_of_fixed_shape() -> None:
    def options(static: Any) -> EngineOptions:
        return EngineOptions("cpu", "float32", "starter-draft", drafter="none", static=static)

    assert options("eager").load_engine().target.static == "eager"
    assert options("auto").load_engine().target.static == "off"


def test_sampling_checks_its_values() -> None:
    settings = SamplingOptions("0.5", top_p=0.9, top_k=20, seed=3).settings()
    assert settings == Sampling(temperature=0.5, top_p=0.9, top_k=20, seed=3)
    assert SamplingOptions("model").settings() is None
    with pytest.raises(SamplingError, match="top_p"):
        SamplingOptions(top_p=0.0)


def test_a_prediction_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("as before\n", encoding="utf-8")

    def read(text: str | None, **engine: Any) -> dict[str, str]:
        every = EngineOptions(**engine), StoreOptions(), SamplingOptions(), OutputOptions()
        return TextOptions(*every, prediction=text).read_prediction()

    assert read(None) == {}
    assert read(f"@{file}") == {"prediction": "as before\n"}
    drafters: list[dict[str, str]] = [{}, {"drafter": "context"}]
    for engine in (*drafters, {"drafter": "none", "draft_model": "starter-draft"}):
        assert read("the same", **engine) == {"prediction": "the same"}
    with pytest.raises(InputError, match=r"missing\.txt"):
        read(f"@{tmp_path / 'missing.txt'}")
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="UTF-8"):
        read(f"@{file}")


def test_the_tenant_is_the_scope_of_the_drafter(tmp_path: Path) -> None:
    folder, store = tmp_path / "model", tmp_path / "c.store"
    tiny.save(folder)
    CorpusIndex.build([], tiny.tokenizer(), store).close()
    options = EngineOptions("cpu", model=str(folder), drafter="rest", budget="8")
    drafter = options.load_engine(StoreOptions(store, tenant="tenant")).drafter
    assert drafter is not None
    _, rest = within(drafter)
    assert isinstance(rest, RestDrafter) and rest.scope == "tenant"


def test_control_characters_of_a_document_are_not_printed() -> None:
    assert printable("a\x1b[31mb\x07\rc\u202ed") == "a\ufffd[31mb\ufffd\ufffdc\ufffdd"
    harmless = "tab\tline\nünïcode 中文\u00a0\u2009\u200d!"
    assert printable(harmless) == harmless


def test_results_go_to_stdout_and_notes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.piece("[bold]one")
    terminal.line(" two")
    terminal.note("[red]remark")
    terminal.error("wrong")
    with terminal.working("loading"):
        pass
    out, err = capsys.readouterr()
    assert out == "[bold]one two\n"
    assert err == "[red]remark\nerror: wrong\nloading ...\n"


def test_a_terminal_displays_the_prefill_until_its_end() -> None:
    terminal, err = Terminal(), io.StringIO()
    terminal.err = Console(file=err, force_terminal=True, width=80)
    with terminal.prefill_progress() as on_progress:
        on_progress(0, 7500)
        assert terminal.err._live_stack
        on_progress(2048, 7500)
        on_progress(7500, 7500)
        assert not terminal.err._live_stack, "the text that follows has the line to itself"
        on_progress(0, 3000)  # interrupted here
    assert not terminal.err._live_stack
    assert "reading 2,048 of 7,500 tokens" in err.getvalue()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_long_prefill_is_logged_in_a_pipe(
    quiet: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with Terminal(quiet=quiet).prefill_progress() as on_progress:
        for now in (100.0, 109.0, 110.0, 119.0, 121.0):
            on_progress(int(now), 2000)
        on_progress(2000, 2000)
    lines = "" if quiet else "reading 110 of 2,000 tokens\nreading 121 of 2,000 tokens\n"
    assert capsys.readouterr() == ("", lines)


def test_quiet_keeps_errors_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(quiet=True)
    terminal.note("remark")
    terminal.json({"text": "é\nb"})
    terminal.error("wrong")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"text": "é\nb"} and out.count("\n") == 1
    assert err == "error: wrong\n"


def test_a_table_in_a_pipe_shows_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().table("Title", ["name", ">n"], [("a\x1bb", "1"), (long := "c" * 300, "23")])
    out = capsys.readouterr().out
    assert all(cell in out for cell in ("Title", "name", "a\ufffdb", "23", long))
    assert ">n" not in out
