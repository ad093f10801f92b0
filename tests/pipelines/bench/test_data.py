"""Evaluation data on disk: the layouts that are read, and what is wrong with others."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ragspec.errors import InputError
from ragspec.pipelines.bench.data import gold_questions, holds, long_documents, read_records


def test_long_documents_by_index_or_any_folder(tmp_path: Path) -> None:
    row = {"name": "w", "title": "Words", "file": "w.txt.gz"}
    (tmp_path / "longdocs").mkdir()
    (tmp_path / "longdocs" / "index.jsonl").write_text(json.dumps(row) + "\n\n")
    with gzip.open(tmp_path / "longdocs" / "w.txt.gz", "wt", encoding="utf-8") as file:
        file.write("é of words")
    for folder in (tmp_path, tmp_path / "longdocs"):
        found = long_documents(folder)["w"]
        assert (found.title, found.text) == ("Words", "é of words")
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "a.txt").write_text("Some text.")
    assert [d.text for d in long_documents(tmp_path / "plain").values()] == ["Some text."]


def test_gold_questions_are_those_of_a_split_with_short_answers(tmp_path: Path) -> None:
    (tmp_path / "docqa").mkdir()
    rows = [
        {"id": f"{split}-{tier}", "split": split, "tier": tier, "doc_id": "d"}
        | {"question": "?", "answers": ["a"], "evidence_span": [1, 2]}
        for split in ("train", "valid")
        for tier in ("wiki", "pyfaq")
    ]
    text = "\n".join(map(json.dumps, rows))
    (tmp_path / "docqa" / "items.jsonl").write_text(text)
    assert [question.id for question in gold_questions(tmp_path)] == ["valid-wiki"]
    assert gold_questions(tmp_path, "train")[0].evidence == (1, 2)


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    for name, kind in (("a.jsonl.gz", "gzipped JSON lines"), ("a.jsonl", "JSON lines")):
        (tmp_path / name).write_text("{not json")
        with pytest.raises(InputError, match=f"{name} cannot be read .* expected {kind}"):
            list(read_records(tmp_path / name))


@pytest.mark.parametrize(
    ("text", "held"), [("It is  A\nRIVER.", True), ("a bird", True), ("ariver", False)]
)
def test_an_answer_holds_a_gold_one(text: str, held: bool) -> None:
    assert holds(text, ("a river", "Bird")) is held
