import errno
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

import ragspec
from ragspec import __main__ as entry
from ragspec.pipelines.cli import show
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.generate import GenerateOptions
from ragspec.pipelines.cli.show import INTERRUPTED
from ragspec.pipelines.console.options import EngineOptions
from ragspec.pipelines.console.terminal import Terminal
from ragspec.reports.trace import read_trace
from tests.support import tiny
from tests.support.command_line import Capture, output_of, run
from tests.support.damage import full_disk


@pytest.mark.parametrize("command", ["doctor", "index build . -o i"])
def test_help_imports_no_model_library_and_numpy_comes_before_torch(
    command: str, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("A tree.")
    code = (
        "import sys; from ragspec.pipelines.cli.app import main; code = main(['ask', '--help'])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules)\n"
        "code = code or main(['bench', 'text', '-h']); heavy |= {'torch'} & set(sys.modules)\n"
        "sys.modules['torch'] = None  # torch would lose an interrupt while it imports numpy\n"
        "try: main(['--debug', *sys.argv[1:]])\n"
        "except ModuleNotFoundError: code = code or 'numpy' not in sys.modules\n"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    words = [sys.executable, "-c", code, *command.split()]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    assert {"--docs", "--compare", "--variants"} <= set(done.stdout.split())


def test_version_help_and_warnings_are_printed(capsys: Capture) -> None:
    assert output_of(capsys, "--version").out == f"ragspec {ragspec.__version__}\n"
    assert "Commands" in output_of(capsys, code=2).out
    warnings.showwarning("too long", UserWarning, "a.py", 1)
    assert capsys.readouterr().err == "warning: too long\n"


def test_debug_shows_where_an_error_came_from(capsys: Capture) -> None:
    with pytest.raises(ragspec.RagspecError, match="absent"):
        main(["report", "absent.jsonl", "--debug"])
    assert main(["report", "--", "--debug"]) == 2


def test_an_early_interrupt_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr(EngineOptions, "load_engine", Mock(side_effect=KeyboardInterrupt))
    assert "interrupted" in output_of(capsys, "generate", "a", code=130).err


def test_stop_strings_may_name_line_breaks() -> None:
    options: Any = SimpleNamespace(stop=[r"a\n", r"\\n", "\n"])
    assert GenerateOptions.stops(options) == ["a\n", r"\n", "\n"]


def test_a_prediction_saves_forwards(model: str, tmp_path: Path, capsys: Capture) -> None:
    arguments = ["generate", "A draft ", "--model", model, "--max-new-tokens", "30"]
    arguments += ["--budget", "8"]
    result = run(capsys, *arguments)
    (tmp_path / "answer.txt").write_text(result["text"])
    again = run(capsys, *arguments, "-s", f"prediction=@{tmp_path / 'answer.txt'}")
    assert again["text"] == result["text"]
    assert again["report"]["accepted_prediction_tokens"] > 0
    assert again["report"]["forwards"] <= result["report"]["forwards"]


@pytest.mark.parametrize(("at", "compare"), [(3, False), (10, True), (21, True)])
def test_an_interrupt_prints_the_text_so_far(
    at: int, compare: bool, model: str, capsys: Capture, interrupt_at: Callable[[int], None]
) -> None:
    interrupt_at(at)  # a comparison takes 7 to warm up, 9 and 9 for the two runs
    arguments = ["generate", "A tree ", "--model", model, "--drafter", "none", "--json"]
    arguments += ["--compare"] * compare + ["--max-new-tokens", "10"]
    result = json.loads(output_of(capsys, *arguments, code=INTERRUPTED).out)
    assert result["report"]["tokens"] == (10 if at == 21 else 4)
    assert at == 21 or result["finish_reason"] == "cancelled"
    assert "compare" not in result  # half of a run would count as another text


def test_an_error_of_the_system_is_one_line(
    model: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(show, "show", full_disk)
    arguments = ["generate", "A tree ", "--model", model, "--max-new-tokens", "4"]
    err = output_of(capsys, *arguments, code=1).err
    assert "the system refused: [Errno 28] No space left" in err
    with pytest.raises(OSError, match="No space"):
        main(["--debug", *arguments])
    locked = PermissionError(errno.EACCES, "Permission denied", "a/b")
    monkeypatch.setattr(show, "show", Mock(side_effect=locked))
    err = output_of(capsys, *arguments, code=2).err
    assert "that this user may use, got a/b. Change" in err
    monkeypatch.setattr(Terminal, "line", full_disk)
    assert "the system refused" in output_of(capsys, "--version", code=1).err
    monkeypatch.setattr("sys.stderr", None)  # closed by the caller
    assert output_of(capsys, "report", "absent.jsonl", code=2).out == ""


@pytest.mark.parametrize("drafter", ["rasd", "fused", "model", "context"])
def test_a_draft_model_of_another_vocabulary_ends_with_6(
    drafter: str, model: str, tmp_path: Path, capsys: Capture
) -> None:
    swapped, smaller = tmp_path / "swapped", tmp_path / "smaller"
    tiny.save(swapped, num_hidden_layers=1)
    tokens = json.loads((swapped / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (swapped / "tokenizer.json").write_text(json.dumps(tokens), encoding="utf-8")
    tiny.model(num_hidden_layers=1, vocab_size=50).save_pretrained(smaller)
    requests = ["generate", "A tree ", "--model", model, "--drafter", drafter, "--draft-model"]
    assert "differs from the target's in 2 of" in output_of(capsys, *requests, swapped, code=6).err
    assert "50 token ids and the target 97" in output_of(capsys, *requests, smaller, code=6).err


def test_the_last_line_break_and_the_byte_order_mark_of_standard_input_are_removed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    trace, prompts = tmp_path / "t.jsonl", []
    command = ["generate", "-", "--model", model, "--max-new-tokens", "3", "--trace", trace]
    for text in ("Hello.", "\ufeffHello.\n", "Hello.\n\n"):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        output_of(capsys, *command)
        prompts.append(read_trace(trace).extra["prompt"])
    assert prompts == ["Hello.", "Hello.", "Hello.\n"]


def test_interrupts_during_the_import_and_their_handling_end_with_130(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    codes, interrupted = list[int](), Mock(side_effect=KeyboardInterrupt)
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(entry, "import_module", interrupted)
    for _ in range(2):
        with pytest.raises(SystemExit):
            entry.run()
        monkeypatch.setattr(signal, "signal", interrupted)
    assert codes == [INTERRUPTED] * 2


def test_a_full_disk_costs_the_trace_and_not_the_answer(
    model: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, full = tmp_path / f"{250 * 't'}.json", Path("/dev/full")
    run = ["generate", "a", "--model", model, "--max-new-tokens", "3", "--json", "--trace"]
    if full.exists():
        assert "'/dev/full'" in output_of(capsys, *run, full, code=2).err
        assert full.exists()
    (link := tmp_path / "link").symlink_to(path)
    output_of(capsys, *run, link)
    path.chmod(0o640)
    output_of(capsys, *run, path)
    earlier = path.read_bytes()
    assert link.is_symlink() and earlier and path.stat().st_mode & 0o777 == 0o640

    def fill(file: Path, text: str, **options: str) -> None:
        file.write_bytes(b"{")
        full_disk()

    monkeypatch.setattr(Path, "write_text", fill)
    out, err = output_of(capsys, *run, link, code=2)
    assert json.loads(out)["report"]["tokens"] == 3
    assert "No space left" in err and link.read_bytes() == earlier
    assert {*tmp_path.iterdir()} == {link, path}


@pytest.mark.parametrize("command", ["ask-long Q --doc F --save-cache", "train-head --data F -o"])
def test_a_folder_of_others_is_refused_at_once(
    command: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("A tree.")
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    words = command.replace("F", str(tmp_path / "a")).split()
    assert f"may write, got {tmp_path}." in output_of(capsys, *words, tmp_path / "b/c", code=2).err
