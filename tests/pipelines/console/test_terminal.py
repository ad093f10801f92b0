from __future__ import annotations

import io
import json

import pytest

from ragspec.pipelines.console.terminal import Terminal, printable
from ragspec.pipelines.page.run_view import Span


def test_control_characters_of_a_document_never_accept_prob_the_terminal() -> None:
    assert printable("a\x1b[31mb\x07\rc\u202ed") == "a\ufffd[31mb\ufffd\ufffdc\ufffdd"
    harmless = "tab\tline\nünïcode 中文\u00a0\u2009\u200d!"
    assert printable(harmless) == harmless


def test_results_go_to_stdout_and_remarks_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    terminal.piece("[bold]one")
    terminal.line(" two")
    terminal.note("[red]remark")
    terminal.error("wrong")
    with terminal.working("loading"):
        pass
    out, err = capsys.readouterr()
    assert out == "[bold]one two\n"
    assert err == "[red]remark\nerror: wrong\n"


def test_prefill_is_displayed_on_a_terminal_until_all_is_read() -> None:
    from rich.console import Console

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
def test_prefill_is_not_displayed_in_a_pipe(
    quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with Terminal(quiet=quiet).prefill_progress() as on_progress:
        for done in (0, 1024, 2000):
            on_progress(done, 2000)
    assert capsys.readouterr() == ("", "")


def test_quiet_keeps_errors_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal(quiet=True)
    terminal.note("remark")
    terminal.json({"text": "é\nb"})
    terminal.error("wrong")
    out, err = capsys.readouterr()
    assert json.loads(out) == {"text": "é\nb"} and out.count("\n") == 1
    assert err == "error: wrong\n"


def test_spans_are_printed_as_their_text(capsys: pytest.CaptureFixture[str]) -> None:
    spans = [Span.of(" one", "s0", ""), Span.of(" [two]", "local", ""), Span.of("\n", "local", "")]
    Terminal().spans(spans, [("context", "s0")])
    out, err = capsys.readouterr()
    assert out == " one [two]\n"
    assert err == ""  # the legend explains colours, and there are none in a pipe


def test_table_holds_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    Terminal().table("Title", ["name", ">n"], [("a\x1bb", "1"), ("c", "23")])
    out = capsys.readouterr().out
    assert all(cell in out for cell in ("Title", "name", "a\ufffdb", "23"))
    assert ">n" not in out
