from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ragspec.errors import InputError
from ragspec.models.resolve import BUNDLED
from ragspec.pipelines.cli import demo
from ragspec.pipelines.cli.app import main
from ragspec.pipelines.cli.compare import Divergence
from ragspec.pipelines.cli.demo import (
    Item,
    Summary,
    UnequalTextError,
    ask_all,
    demo_engine,
    guide,
    questions_of,
    refuse_unequal,
    show_table,
    write_report,
)
from ragspec.pipelines.console.terminal import Terminal
from ragspec.pipelines.docqa.docqa import DocQA
from tests.support import tiny

TEXT = (
    "# Walk\n\nThe walk follows the tokens of the target <script>alert(1)</script> through the "
    "tree.\n\n# Budget\n\nThe budget is the number of nodes that a step may verify.\n"
)
QUESTIONS = ["What does the walk follow?", "What is the budget?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("guide")
    (made / "guide.md").write_text(TEXT)
    return made


@pytest.fixture(scope="module")
def qa(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> DocQA:
    model = tmp_path_factory.mktemp("model")
    tiny.model(max_position_embeddings=2048).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    return DocQA.from_documents(folder, engine=demo_engine(str(model)), embedder=None)


@pytest.fixture(scope="module")
def items(qa: DocQA) -> list[Item]:
    return list(ask_all(qa, QUESTIONS))


def test_both_runs_of_a_question_give_one_text(items: list[Item]) -> None:
    assert [item.question for item in items] == QUESTIONS
    assert all(item.compared.equal for item in items)
    assert all(item.answer.report.drafted >= 0 and item.compared.seconds > 0 for item in items)
    refuse_unequal(items)


def test_a_text_that_differs_is_an_error_that_names_the_question(items: list[Item]) -> None:
    wrong = replace(
        items[1].compared, equal=False, first_divergence=Divergence(3, 1, 2, margin=0.5)
    )
    with pytest.raises(UnequalTextError, match="What is the budget"):
        refuse_unequal([items[0], replace(items[1], compared=wrong)])


def with_figures(item: Item, ratio: float, loop_share: float) -> Item:
    report = replace(item.answer.report, loop_share=loop_share)
    compared = replace(item.compared, ratio=ratio, seconds=1.0)
    return replace(item, answer=replace(item.answer, report=report), compared=compared)


def test_summary_is_medians_and_sums_without_loops(items: list[Item]) -> None:
    figures = [(1.0, 0.0), (9.0, 0.9), (3.0, 0.1), (2.0, 0.0)]
    made = [with_figures(items[0], *pair) for pair in figures]
    summary = Summary.of(made)
    assert (summary.questions, summary.equal, summary.looping, summary.ratio) == (4, 4, 1, 2.0)
    assert summary.seconds == 4.0
    assert summary.tokens == 4 * items[0].answer.report.tokens
    assert Summary.of(made[1:2]).ratio == 9.0


def test_table_and_page_show_every_question(
    items: list[Item], qa: DocQA, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = Summary.of(items)
    show_table(items, summary, Terminal())
    out = capsys.readouterr().out
    assert "2 of 2 texts equal" in out and out.count(" yes") == 2
    write_report(items, summary, folder, qa, tmp_path / "demo.html")
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    assert all(question in page for question in QUESTIONS)
    assert "<script" not in page and "2 of 2" in page and "TEXT DIFFERS" not in page


def test_questions_come_from_the_file_or_the_headings(qa: DocQA, tmp_path: Path) -> None:
    assert questions_of(tmp_path, qa) == ["What is said about Walk?", "What is said about Budget?"]
    file = tmp_path / "questions.jsonl"
    file.write_text('{"question": "Why?"}\n\n{"question": "How?"}\n')
    assert questions_of(tmp_path, qa) == ["Why?", "How?"]
    assert questions_of(file, qa) == ["Why?", "How?"]
    for broken in ("{", "[]", '{"other": 1}'):
        file.write_text(broken)
        with pytest.raises(InputError, match=r"questions\.jsonl"):
            questions_of(tmp_path, qa)
    file.write_text("")
    with pytest.raises(InputError, match="no questions"):
        questions_of(tmp_path, qa)


def test_a_page_in_a_missing_folder_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for out, said in ((tmp_path / "no" / "d.html", "there is no folder"), (tmp_path, "directory")):
        assert main(["demo", "--out", str(out), "--model", "./absent"]) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("as_json", [False, True])
def test_the_figures_are_shown_before_the_page_is_written(
    as_json: bool,
    items: list[Item],
    qa: DocQA,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(*_: object) -> None:
        raise InputError("the disk is full")

    monkeypatch.setattr(demo, "demo_engine", lambda model: qa.engine)
    monkeypatch.setattr(DocQA, "from_documents", lambda *_, **__: qa)
    monkeypatch.setattr(demo, "ask_all", lambda *_: iter(items))
    monkeypatch.setattr(demo, "write_report", refuse)
    with pytest.raises(InputError, match="the disk is full"):
        demo.run_demo(folder, tmp_path / "d.html", 2, "", Terminal(quiet=as_json), as_json)
    assert ('"equal": 2' if as_json else "2 of 2 texts equal") in capsys.readouterr().out


def test_the_bundled_demonstration_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    needed = [guide() / "questions.jsonl", BUNDLED["starter"], BUNDLED["starter-embedder"]]
    for path in needed:
        if not path.exists():
            pytest.skip(f"{path.name} is not bundled yet")
    out = tmp_path / "demo.html"
    assert main(["demo", "--questions", "2", "-o", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["summary"]["equal"] == 2
    assert out.stat().st_size > 5000
