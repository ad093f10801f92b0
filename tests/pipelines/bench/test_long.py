"""`ragspec bench long` at toy size: every way, what is written when, and what it refuses."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ragspec.pipelines.bench import long_ways
from ragspec.pipelines.bench.long_tasks import KINDS
from ragspec.pipelines.cli.app import main
from tests.support import tiny

WAYS = ("auto", "rapid:4", "auto+rapid")
STEERED = "steered, eta 5"
SENTENCE = "The walk keeps a token of the draft tree and the rule is kept word for word. "
EVIDENCE = "The target is the river."


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    text = "".join(f"Part {number}. {SENTENCE}" for number in range(40))
    (folder / "longdocs").mkdir()
    rows = [{"name": name, "title": name, "file": f"{name}.txt.gz"} for name in ("one", "two")]
    for row in rows:
        with gzip.open(folder / "longdocs" / row["file"], "wt", encoding="utf-8") as file:
            file.write(text)
    index = folder / "longdocs" / "index.jsonl"
    index.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "docqa").mkdir()
    whole = f"{EVIDENCE} {text} {EVIDENCE}"
    with gzip.open(folder / "docqa" / "documents.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write(json.dumps({"doc_id": "d", "title": "d", "text": whole}) + "\n")
    asked: dict[str, Any] = {"split": "valid", "tier": "x", "doc_id": "d", "question": "What is?"}
    spans = {"near": [0, len(EVIDENCE)], "far": [len(whole) - len(EVIDENCE), len(whole)]}
    items = [asked | {"id": n, "answers": ["e"], "evidence_span": at} for n, at in spans.items()]
    items.append(items[0] | {"id": "train", "split": "train"})
    lines = "".join(json.dumps(item) + "\n" for item in items)
    (folder / "docqa" / "items.jsonl").write_text(lines, encoding="utf-8")
    tiny.model(max_position_embeddings=2048).save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    return folder


def run(data: Path, *more: str) -> int:
    given = ("--model", str(data / "model"), "--items", "2", "--documents", "1", "--start", "8")
    drafted = ("--draft-model", "self", "--new-tokens", "9")
    return main(["bench", "long", "--data", str(data), *given, *drafted, *more])


def test_every_way_answers_every_kind_and_length(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "rows.json", tmp_path / "page.html"
    files = ("--json", str(out), "--page", str(page))
    ways = ("--ways", ",".join(WAYS), "--eta", "5", "--peer", "--retrieval")
    assert run(data, "--lengths", "400,550", *ways, *files) == 0
    known = json.loads(out.read_text())
    names = ["plain", *WAYS, STEERED, long_ways.PEER, long_ways.RETRIEVAL]
    rows = {(row["kind"], row["length"], row["way"]): row for row in known["rows"]}
    assert set(rows) == {(kind, n, way) for kind in KINDS for n in (400, 550) for way in names}
    for (kind, _, way), row in rows.items():
        assert row["prompts"] == (1 if kind == "questions" else 2)  # the far evidence is not read
        assert row["equal"] == (None if way in (STEERED, long_ways.RETRIEVAL) else 1.0)
        assert (row["gold"] is None) == (kind != "questions")
        assert row["ms"] > 0
    for way in ("plain", long_ways.PEER):
        assert rows["summaries", 550, way]["tokens_per_forward"] == 1.0
        assert rows["summaries", 550, way]["c"] is None
    assert rows["summaries", 550, "rapid:4"]["c"] > 0
    for each in known["asked"]:
        assert each["length"] < each["tokens"] < each["length"] + 80
        assert all(step[0] <= 4 for step in each["ways"]["rapid:4"]["steps"])
        assert list(each["ways"]) == names
    printed = capsys.readouterr().out
    assert "quotations, 550 tokens" in printed and "quarter" in printed
    html = page.read_text()
    assert html.count('class="line ') > 0 and "<script" not in html


def test_an_interrupt_loses_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, answered = tmp_path / "rows.json", long_ways.DraftingWay.answer

    def interrupted(self: Any, task: Any, new_tokens: int) -> Any:
        if task.id == "summaries-1":
            raise KeyboardInterrupt
        return answered(self, task, new_tokens)

    monkeypatch.setattr(long_ways.DraftingWay, "answer", interrupted)
    given = ("--lengths", "250", "--kinds", "summaries", "--ways", "context")
    assert run(data, *given, "--json", str(out)) == 130
    known = json.loads(out.read_text())
    assert [each["task"] for each in known["asked"]] == ["summaries-0"]
    assert [row["prompts"] for row in known["rows"]] == [1, 1]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--kinds", "poems"), "unknown kind 'poems'. Known: questions, summaries, quotations."),
        (("--lengths", "many"), "--lengths is 'many'; expected numbers above 0"),
        (("--lengths", "20", "--kinds", "quotations"), "nothing could be asked over"),
        (("--lengths", "100,0"), "--lengths is '100,0'; expected numbers above 0"),
        (("--eta", "-1"), "--eta is '-1'; expected numbers above 0"),
        (("--ways", "autos"), "unknown mode 'autos'"),
        (("--json", "/nowhere/at/all.json"), "nowhere"),
    ],
)
def test_what_it_refuses(
    data: Path, more: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, *more) == 2
    assert expected in " ".join(capsys.readouterr().err.split())


def test_what_does_not_fit_the_context_is_told(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(data, "--lengths", "3000") == 3
    assert "of a context of 2,048" in " ".join(capsys.readouterr().err.split())


def test_a_drafter_without_its_model_is_refused(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--data", str(data), "--model", str(data / "model"), "--ways", "rapid"]
    assert main(["bench", "long", *given]) == 2
    assert "Give it with --draft-model, 'self' for the target itself" in " ".join(
        capsys.readouterr().err.split()
    )
