"""`ragspec chat` and `generate --chat`, with typed lines on standard input."""

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ragspec.pipelines.console.terminal import Terminal
from ragspec.verification import reading as target_reading
from tests.support import tiny
from tests.support.command_line import Capture, output_of, run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp("chat"), chat=True, max_position_embeddings=1024)


@pytest.fixture
def docs(tmp_path: Path) -> str:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "pets.txt").write_text("The cat sleeps on the sofa and eats fish.\n")
    (folder / "photo.png").write_bytes(b"x")
    return str(folder)


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    text = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text), "utf-8"))


def test_turns_and_commands(model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    typed(monkeypatch, "\ufeff/help", "Hello.", "", "And then?", "/what", "/clear", "/exit", "x")
    out, err = output_of(capsys, "chat", "--model", model, "--max-new-tokens", "12")
    assert len(out.rstrip("\n").split("\n")) == 2, "two answers, each on its line"
    assert "no command /what" in err and "a new conversation" in err
    assert "cut at the limit of tokens" in err


def test_each_turn_searches_the_documents_and_notes_its_support(
    model: str, docs: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    twice = ["What does the cat eat?"] * 2
    typed(monkeypatch, "Who was Hannibal?", *twice, "Explain simpler please.")
    out, err = output_of(capsys, "chat", "--model", model, "--docs", docs, "--max-new-tokens", "4")
    assert out.startswith("The documents do not speak of this.\n")
    assert all(e in err for e in ("the model was not called", "photo.png"))
    assert err.count("no passage was found") == 1
    assert "unsupported: no one sentence surely speaks of the question" in err


def test_a_closed_standard_input_is_empty(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for command, code in (["chat"], 0), (["generate", "-"], 2):
        monkeypatch.setattr("sys.stdin", None)
        assert output_of(capsys, *command, "--model", model, code=code).out == ""


@pytest.mark.parametrize("more", ["--max-new-tokens 6", "-s prompt=extract"])
def test_the_first_question_may_be_an_argument(
    model: str, docs: str, more: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    typed(monkeypatch, "And where does it sleep?")
    # So low a temperature always samples the same text, which has no line break.
    arguments = ["chat", "What does the cat eat?", "--docs", docs, "--model", model, "-t", ".001"]
    out, err = output_of(capsys, *arguments, *more.split())
    assert len(out.rstrip("\n").split("\n")) == 2
    assert err.count("seed ") == (0 if "extract" in more else 2)


def test_an_error_in_a_turn_does_not_end_the_conversation(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    typed(monkeypatch, "word " * 400, "caf\udce9", "Hello.")
    out, err = output_of(capsys, "chat", "--model", model, "--max-new-tokens", "4")
    assert err.count("error:") == 2 and "error: Expected text in UTF-8" in err and out.strip()


def test_an_interrupt_ends_the_answer_and_not_the_conversation(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Capture,
    interrupt_at: Callable[[int], None],
) -> None:
    typed(monkeypatch, "Hello.", "And then?")
    interrupt_at(3)
    out, err = output_of(capsys, "chat", "--model", model, "--max-new-tokens", "12")
    assert err.count("interrupted; the text so far is kept") == 1
    assert len(out.rstrip("\n").split("\n")) == 2, "the second question is answered"


def test_generate_answers_in_the_chat_template(model: str, capsys: Capture) -> None:
    command = ["generate", "Hello.", "--model", model, "--max-new-tokens", "5"]
    lengths = []
    for extra in ([], ["--chat"], ["--chat", "-s", "system=Be brief."], ["--chat", "--compare"]):
        lengths.append(run(capsys, *command, *extra)["report"]["prompt_tokens"])
    turn = len("<user> Hello.\n<assistant> ")
    assert lengths == [6, turn, turn + len("<system> Be brief.\n"), turn]


def test_temperature_of_the_generation_config(model: str, tmp_path: Path, capsys: Capture) -> None:
    command = ["generate", "Hello.", "--max-new-tokens", "12", "--seed", "5"]

    def text(*more: str) -> str:
        return str(run(capsys, *command, *more)["text"])

    tiny.save(tmp_path, max_position_embeddings=1024)
    config = json.loads((tmp_path / "generation_config.json").read_text())
    chosen = config | {"do_sample": True, "temperature": 0.7, "top_k": 9}
    (tmp_path / "generation_config.json").write_text(json.dumps(chosen))
    named = ("--model", str(tmp_path))
    assert text(*named, "-t", "model") == text(*named, "-t", "0.7", "-s", "top-k=9")
    assert text(*named, "-t", "model") != text(*named)
    greedy = ("--model", model)
    assert text(*greedy, "-t", "model") == text(*greedy)


@pytest.mark.parametrize("command", ["chat", "ask --compare", "generate --compare"])
def test_the_prefill_of_a_prompt_is_reported_to_the_terminal(
    command: str, model: str, docs: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The plain run of --compare has a spinner and reports no prefill."""
    calls: list[tuple[int, int]] = []

    @contextmanager
    def progress(terminal: Terminal) -> Iterator[Callable[[int, int], None]]:
        yield lambda done, total: calls.append((done, total))

    monkeypatch.setattr(target_reading, "PIECE", 3)
    monkeypatch.setattr(Terminal, "prefill_progress", progress)
    typed(monkeypatch)
    name, *more = command.split()
    more += ["--docs", docs] if name == "ask" else []
    question = "What does the cat eat?"
    output_of(capsys, name, question, "--model", model, "--max-new-tokens", "2", *more)
    assert len(calls) > 2 and calls[0][0] == 0 and calls[-1][0] == calls[-1][1]
    assert sum(done == 0 for done, _ in calls) == 1
