"""`ragspec ask`, `ask-iterative` and `ask-long`, as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.answering.docqa import DocQA
from ragspec.pipelines.cli.app import main
from ragspec.retrievers.search.passage_index import PassageIndex
from tests.support import tiny
from tests.support.command_line import Capture, output_of, run
from tests.support.damage import full_disk
from tests.support.toy_embedder import make_embedder

PAGES = {
    "trees.md": "# Trees\n\nA tree of drafts holds several continuations of one text. The widest "
    "tree is not the best tree: every node costs a little time.\n",
    "rules.txt": "The walk follows the tokens of the target through the tree. What it keeps is "
    "what the target would have written alone.\n",
}


def write_pages(folder: Path) -> Path:
    folder.mkdir()
    for name, text in PAGES.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return tiny.save(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an index without a dense part, which needs no embedder."""
    folder = write_pages(tmp_path_factory.mktemp("index") / "pages")
    out = folder.parent / "pages.idx"
    DocQA.from_documents(folder, embedder=None).save(out)
    return str(out)


def ask(
    capsys: Capture, index: str, model: str, *more: str, command: str = "ask"
) -> dict[str, Any]:
    arguments = [command, "What does the walk follow?", "--docs", index, "--model", model]
    return run(capsys, *arguments, "--max-new-tokens", "40", *more)


def test_an_answer_has_the_documented_fields(index: str, model: str, capsys: Capture) -> None:
    result = ask(capsys, index, model, "-s", "top-passages=1", "--seed", "3", "-t", "0.7")
    assert {"answer", "citations", "passages", "label", "report"} <= result.keys()
    assert result["label"] == "exact" and result["report"]["seed"] == 3
    assert [passage["document"] for passage in result["passages"]] == ["rules.txt"]
    assert result["report"]["milliseconds"]["retrieve"] > 0
    assert "compare" not in result


@pytest.mark.parametrize("speculate", ["auto", "off", "4"])
def test_iterative_answers_report_their_searches(
    index: str, model: str, capsys: Capture, speculate: str
) -> None:
    options = ("--stride", "5", "-s", "search=sparse", "-s", f"speculate={speculate}", "--compare")
    noise = ("--seed", "3", "-t", "0.7")
    result = ask(capsys, index, model, *options, *noise, command="ask-iterative")
    searches = result["report"]["retrieval"]
    assert searches["strides"] == len(result["passages"]) == -(-result["report"]["tokens"] // 5)
    assert result["compare"]["equal"] and result["label"] == "exact"
    if speculate == "off":
        assert searches["calls"] == searches["strides"] and searches["hits"] == 0


def test_rounds_write_the_whole_answer_again(index: str, model: str, capsys: Capture) -> None:
    options = ("-s", "rounds=3", "--no-refusal")
    result = ask(capsys, index, model, *options, command="ask-iterative")
    assert len(result["passages"]) == 3
    assert result["report"]["retrieval"]["strides"] == 3


def test_the_page_shows_searches(index: str, model: str, tmp_path: Path, capsys: Capture) -> None:
    trace, page = str(tmp_path / "t.jsonl"), tmp_path / "page.html"
    for command in ("ask-iterative", "ask"):
        ask(capsys, index, model, "--trace", trace, command=command)
        assert main(["report", trace, "-o", str(page)]) == 0
        assert ("Looked up" in page.read_text()) is (command == "ask-iterative")


def test_prompts_by_file_and_by_name(
    index: str, model: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "mine.jinja").write_text("{{ passages[0].text }} {{ question }}")
    result = ask(capsys, index, model, "-s", f"prompt={tmp_path / 'mine.jinja'}")
    assert result["evidence"] == ""
    assert result["cut"] is True
    requests = ["ask", "What does the walk follow?", "--docs", index, "--model", model]
    err = output_of(capsys, *requests, "-s", "prompt=answer", "--max-new-tokens", "3").err
    assert "no one sentence surely speaks of" in err and "cut at the limit" in err
    extract = run(capsys, *requests, "-s", "prompt=extract", "-s", "top-passages=1")
    assert len(extract["passages"]) == 1 and extract["skipped"] == []


@pytest.mark.parametrize("command", ["ask", "ask-iterative", "ask-long"])
def test_an_extract_is_printed_once_and_has_a_trace(
    command: str, index: str, model: str, report: str, tmp_path: Path, capsys: Capture
) -> None:
    documents = ["--doc", report] if command == "ask-long" else ["--docs", index]
    inputs = [command, "What does the walk keep?", *documents, "-m", model, "-s", "prompt=extract"]
    text, trace = run(capsys, *inputs)["answer"], tmp_path / "t.jsonl"
    assert output_of(capsys, *inputs).out == f"{text}\n"
    out, err = output_of(capsys, *inputs, "--compare", "--trace", trace)
    assert out == f"{text}\n" and "nothing to compare" in err
    assert json.loads(trace.read_text().splitlines()[0])["sentences"][0]["text"] in text


def test_a_predicted_answer_is_accepted(index: str, model: str, capsys: Capture) -> None:
    result = ask(capsys, index, model, "--budget", "8")
    again = ask(capsys, index, model, "--budget", "8", "-s", f"prediction={result['answer']}")
    assert again["answer"] == result["answer"]
    assert again["report"]["accepted_prediction_tokens"] > 0


def test_trace_names_the_passages_that_drafts_came_from(
    index: str, tmp_path: Path, capsys: Capture
) -> None:
    trace = tmp_path / "trace.jsonl"
    result = ask(capsys, index, "starter", "--trace", str(trace), "--compare", "--budget", "6")
    assert result["compare"]["equal"] is True and result["report"]["drafted"] > 0
    header, *steps, _ = map(json.loads, trace.read_text(encoding="utf-8").splitlines())
    texts = "".join(text for step in steps for text in step["texts"])
    assert texts.strip() == result["answer"].strip()
    names = header["documents"]
    assert names == [f"{p['document']}, passage {k}" for k, p in enumerate(result["passages"], 1)]
    assert header["question"] == "What does the walk follow?"
    assert header["compare"] == result["compare"]
    page = tmp_path / "page.html"
    assert main(["report", str(trace), "-o", str(page)]) == 0
    assert header["sentences"][0]["text"] in page.read_text()
    (citation,) = header["citations"]
    assert citation["matched_by"] == "draft" and citation["text"].startswith("The walk follows")
    assert PAGES[citation["document"]][citation["start"] : citation["end"]] == citation["text"]


def test_an_interrupt_prints_the_answer_so_far_as_json(
    index: str, model: str, capsys: Capture, interrupt_at: Callable[[int], None]
) -> None:
    interrupt_at(3)
    arguments = ["ask", "What does the walk follow?", "--docs", index, "--model", model]
    result = json.loads(output_of(capsys, *arguments, "--drafter", "none", "--json", code=130).out)
    assert result["report"]["tokens"] == 4 and result["skipped"] == []


def test_an_answer_beyond_the_context_ends_with_3(index: str, model: str, capsys: Capture) -> None:
    long = ["ask", "What is a walk?", "--docs", index, "--max-new-tokens", "4000"]
    out, err = output_of(capsys, *long, "-m", model, code=3)
    assert out == "" and "Traceback" not in err and "error:" in err


def test_a_named_embedder_searches(tmp_path: Path, model: str, capsys: Capture) -> None:
    folder, instance = write_pages(tmp_path / "pages"), str(tmp_path / "pages.idx")
    toy = str(make_embedder(tmp_path / "toy"))
    output_of(capsys, "index", "build", folder, "--out", instance, "--embedder", toy)
    opened = DocQA.from_index(instance).retriever
    assert isinstance(opened, PassageIndex) and opened.dense is not None
    assert opened.dense.embedder.name == toy
    assert len(ask(capsys, instance, model)["passages"]) == 2
    requests = ["ask", "What does the walk follow?", "--model", model, "--max-new-tokens", "4"]
    documents = [*requests, "--docs", str(folder), "-s"]
    assert len(run(capsys, *documents, f"embedder={toy}")["passages"]) == 2
    err = output_of(capsys, *documents, f"embedder={tmp_path / 'absent'}", code=5).err
    assert "absent" in err
    other = f"embedder={make_embedder(tmp_path / 'other', seed=1)}"
    err = output_of(capsys, *requests, "--docs", instance, "-s", other, code=8).err
    assert "another embedder" in err


def test_a_question_beside_the_documents_is_refused_without_the_model(
    index: str, model: str, tmp_path: Path, capsys: Capture
) -> None:
    requests = ["ask", "Which tree grows on the mountain?", "--docs", index, "--model", model]
    out, err = output_of(capsys, *requests)
    assert out == "The documents do not speak of this.\n"
    assert "the model was not called: no sentence speaks of the question" in err
    assert "--no-refusal" in err and "1  trees.md" in err
    result = run(capsys, *requests, "--compare")
    assert "no sentence" in result["refused"] and result["support"] == "unsupported"
    assert result["report"]["forward_passes"] == 0 and "compare" not in result
    assert run(capsys, *requests, "--no-refusal", "--max-new-tokens", "5")["refused"] is None
    requests[1], trace, page = "Who was Hannibal?", tmp_path / "t.jsonl", tmp_path / "page.html"
    assert "nearest" not in output_of(capsys, *requests, "--trace", trace).err
    output_of(capsys, "report", trace, "-o", page)
    assert "<h1>Who was Hannibal?</h1>" in (text := page.read_text())
    assert "The documents do not speak of this." in text and "The model was not called: " in text
    assert 'class="badge' not in text and "4-grams" not in text


def test_passages_that_do_not_fit_are_counted(index: str, tmp_path: Path, capsys: Capture) -> None:
    model = tiny.save(tmp_path, max_position_embeddings=256)
    requests = ["ask", "Does the walk follow a node?", "--docs", index, "--model", model]
    err = output_of(capsys, *requests, "--max-new-tokens", "20").err
    assert "1 of 2 passages fit the model's context" in err


TEXT = "The walk keeps a token of the tree. The rule is kept by the target, word for word. " * 3


@pytest.fixture
def report(tmp_path: Path) -> str:
    (tmp_path / "report.txt").write_text(TEXT)
    return str(tmp_path / "report.txt")


def ask_long(capsys: Capture, *arguments: str) -> dict[str, Any]:
    return run(capsys, "ask-long", "What is kept?", *arguments, "--max-new-tokens", "20")


def test_a_saved_document_is_opened_without_another_prefill(
    model: str, report: str, tmp_path: Path, capsys: Capture
) -> None:
    keep = str(tmp_path / "prefix_cache")
    first = ask_long(capsys, "--doc", report, "--save-cache", keep, "--model", model)
    again = ask_long(capsys, "--save-cache", keep, "--model", model, "--compare")
    assert first["answer"] == again["answer"] and again["compare"]["equal"]
    assert again["report"]["cached_tokens"] > 200
    assert again["passages"][0]["document"] == "report.txt"
    part = ask_long(capsys, "--doc", report, "-s", "token-range=10:60", "--model", model)
    assert len(part["passages"][0]["text"]) < len(TEXT) // 2


@pytest.mark.parametrize("drafter", ["auto", "none", "rapid", "context,rapid"])
def test_steering_alone_is_inexact(
    model: str, tmp_path: Path, drafter: str, capsys: Capture
) -> None:
    parts = [f"Part {i} is about trees and so on. " * 4 for i in range(4)]
    (tmp_path / "parts.txt").write_text("\n\n".join([*parts, "A rule is kept by the target."]))
    inputs = ["--doc", str(tmp_path / "parts.txt"), "--model", model]
    inputs += ["--drafter", drafter, "--compare"]
    exact = ask_long(capsys, *inputs)
    assert exact["compare"]["equal"] and exact["label"] == "exact"
    assert bool(exact["chunks"]) == ("rapid" in drafter)
    steered = ask_long(capsys, *inputs, "--steer", "30")
    assert steered["compare"]["equal"] and steered["label"] == "exact-for(RAPID, eta 30)"
    assert steered["chunks"] and steered["report"]["drift"] > 0.0
    assert steered["answer"] != exact["answer"]


def test_a_draft_model_for_rapid(model: str, report: str, tmp_path: Path, capsys: Capture) -> None:
    other = tmp_path / "other"
    inputs = ["--doc", report, "--model", model, "--draft-model", tiny.save(other, seed=1)]
    sampled = [*inputs, "--temperature", "1", "--seed", "3"]
    plain = ask_long(capsys, *sampled, "--drafter", "rapid", "--compare")
    assert plain["compare"]["equal"] and plain["report"]["drafted_by_source"]["rapid"] > 0


def test_a_saved_document_is_not_replaced(
    model: str, report: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["ask-long", "What?", "--model", model, "--max-new-tokens", "5", "--doc", report]
    command += ["--save-cache", str(tmp_path / "cache")]
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", full_disk)
        answer, err = output_of(capsys, *command, code=8)
        assert "No space left" in err
    out, err = output_of(capsys, *command)
    assert out == answer and out.strip() and "saved in" in err
    assert "holds a saved document" in output_of(capsys, *command, code=2).err
