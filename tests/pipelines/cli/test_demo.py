"""The demonstration: both runs of a question give one text, and the figures are those of both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ragspec.errors import InputError
from ragspec.models.resolve import BUNDLED
from ragspec.pipelines.cli import demo
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.compare import Divergence
from ragspec.pipelines.cli.demo import (
    DemoItem,
    UnequalTextError,
    ask_all,
    guide,
    questions_of,
    run_demo,
    summarise,
)
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.docqa.docqa import DocQA
from tests.support import tiny

TEXT = (
    "# Walk\n\nThe walk follows the tokens of the target through the tree.\n\n"
    "# Budget\n\nThe budget is the number of nodes that a step may verify.\n"
)
QUESTIONS = ["What does the walk follow?", "What is the budget?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("guide")
    (path / "guide.md").write_text(TEXT)
    tiny.model(max_position_embeddings=2048).save_pretrained(path / "model")
    tiny.tokenizer().save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def qa(folder: Path) -> DocQA:
    from ragspec.engine.engine import Engine

    engine = Engine.from_pretrained(folder / "model", device="cpu", dtype="float32")
    return DocQA.from_documents(folder / "guide.md", engine=engine, embedder=None)


@pytest.fixture(scope="module")
def items(qa: DocQA) -> list[DemoItem]:
    return list(ask_all(qa, QUESTIONS))


def test_both_runs_of_a_question_give_one_text(items: list[DemoItem]) -> None:
    assert [item.question for item in items] == QUESTIONS
    assert all(item.compared.equal and item.compared.seconds > 0 for item in items)
    assert all(item.answer.report.drafted >= 0 for item in items)


def with_figures(item: DemoItem, ratio: float, loop_share: float) -> DemoItem:
    report = replace(item.answer.report, loop_share=loop_share)
    compared = replace(item.compared, ratio=ratio, seconds=1.0)
    return replace(item, answer=replace(item.answer, report=report), compared=compared)


def test_summary_is_medians_and_sums_without_loops(items: list[DemoItem]) -> None:
    figures = [(1.0, 0.0), (9.0, 0.9), (3.0, 0.1), (2.0, 0.0)]
    several = [with_figures(items[0], *pair) for pair in figures]
    summary = summarise(several)
    expected = {"questions": 4, "equal": 4, "looping": 1, "ratio": 2.0, "seconds": 4.0}
    assert expected.items() <= summary.items()
    assert summary["tokens"] == 4 * items[0].answer.report.tokens
    assert summarise(several[1:2])["ratio"] == 9.0


def test_questions_come_from_the_file_or_the_headings(qa: DocQA, tmp_path: Path) -> None:
    assert questions_of(tmp_path, qa) == ["What is said about Walk?", "What is said about Budget?"]
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Why?"}\n\n{"question": "How?"}\n')
    assert questions_of(tmp_path, qa) == questions_of(file, qa) == ["Why?", "How?"]
    for broken in ("{", "[]", '{"other": 1}'):
        file.write_text(broken)
        with pytest.raises(InputError, match=r"questions\.jsonl"):
            questions_of(tmp_path, qa)
    file.write_text("")
    with pytest.raises(InputError, match="no questions"):
        questions_of(tmp_path, qa)


@pytest.fixture
def run(
    items: list[DemoItem], qa: DocQA, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Return `run_demo` over known items."""
    monkeypatch.setattr(DocQA, "from_documents", lambda *_, **__: qa)

    def runs(text: list[DemoItem], as_json: bool) -> None:
        monkeypatch.setattr(demo, "ask_all", lambda *_: iter(text))
        run_demo(folder, 2, str(folder / "model"), Terminal(quiet=as_json), as_json)

    return runs


def test_what_is_displayed(
    run: Callable[..., None], items: list[DemoItem], capsys: pytest.CaptureFixture[str]
) -> None:
    run(items, False)
    text: Any = capsys.readouterr()
    assert "2 of 2 texts equal" in text.out and text.err.count("the same tokens") == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_a_text_that_differs_is_an_error_after_the_figures(
    as_json: bool,
    run: Callable[..., None],
    items: list[DemoItem],
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = Divergence(3, 1, 2, margin=0.5)
    wrong = replace(items[1].compared, equal=False, first_divergence=first)
    with pytest.raises(UnequalTextError, match="What is the budget"):
        run([items[0], replace(items[1], compared=wrong)], as_json)
    assert ('"equal": 1' if as_json else "1 of 2 texts equal") in capsys.readouterr().out


def test_the_bundled_demonstration_runs(capsys: pytest.CaptureFixture[str]) -> None:
    for path in (guide() / "questions.jsonl", BUNDLED["starter"], BUNDLED["starter-embedder"]):
        if not path.exists():
            pytest.skip(f"{path.name} is not bundled yet")
    assert main(["demo", "--questions", "2", "--json"]) == 0
    text = json.loads(capsys.readouterr().out)
    assert text["summary"]["equal"] == 2
    assert all(item["answer"] and item["tokens"] for item in text["items"])
