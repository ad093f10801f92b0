"""`ragspec bench answers`: figures, page, and refused files."""

import json
from pathlib import Path

import pytest

from ragspec.errors import DocumentError
from ragspec.pipelines.bench.answers import has_answer, read_questions
from ragspec.pipelines.cli.app import main
from tests.support import tiny

TEXT = "E07 means that the pressure is too low."


def test_answers_are_measured_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "pump.md").write_text(f"# Pump\n\n{TEXT}\n")
    model = tmp_path / "model"
    tiny.model("llama", vocab_size=320, max_position_embeddings=1024).save_pretrained(model)
    tiny.bpe_tokenizer().save_pretrained(model)
    lines = [
        {"question": "What does E07 mean?", "answers": ["TOO  low", "weak"]},
        {"question": "Who won <b>the</b> cup?"},
    ]
    questions = tmp_path / "questions.jsonl"
    questions.write_text("\n".join(json.dumps(line) for line in lines))
    rows, page = tmp_path / "rows.json", tmp_path / "page.html"
    request = ["bench", "answers", str(questions), "--docs", str(tmp_path / "docs")]
    files = ["--json", str(rows), "--html", str(page)]
    assert main([*request, "--model", str(model), "-s", "max-new-tokens=4", *files]) == 0
    record = json.loads(rows.read_text())
    answered, refused = record["rows"]
    assert answered["passages"] and answered["sentences"] and answered["texts"] == [TEXT]
    assert not answered["refused"] and answered["tokens"] <= 4
    assert refused["refused"] and refused["right"]
    assert record["figures"]["refused, has none"] == "100.0% of 1"
    assert "refused, has none" in capsys.readouterr().out
    text, gold = page.read_text(), "<bdi>TOO  low</bdi> or <bdi>weak</bdi>"
    assert TEXT in text and "<b>the" not in text and gold in text


@pytest.mark.parametrize(
    "text",
    ["5 m.", "第5章", "on 1.12.5000", "CAFÉS", "café's", "(c++)", "10–17", "“it’s”", "1\u202f600"],
)
def test_a_text_holds_a_gold_answer(text: str) -> None:
    assert has_answer(text, ["5", "5000", "cafe\u0301", "C++", "10-17", '"it\'s"', "1,600"])
    assert not has_answer(text, ["500", "0", "af", "+c"])


@pytest.mark.parametrize("text", ["50 m", "0.5 m", "5,000 m", "5:30 h", "x5", "दिल्ली"])
def test_a_part_of_a_word_or_a_number_is_no_gold_answer(text: str) -> None:
    assert not has_answer(text, ["5", "0", "30", "000", "x", "दिल"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"question": "a"}\n[1]', "line 2"),
        ('{"question": " "}', "line 1"),
        ('{"question": "a", "answers": "b"}', "the answers 'b'; expected {question, answers: "),
        ('{"question": "a", "answers": [5]}', r"answers \[5\]; expected"),
        ('{"question": 5}', "got the question 5 and"),
        ('{"answers": ["b"]}', "question"),
        (
            '{"question": "a", "gold_answers": ["b"], "answer_type": 1}',
            "'answer_type' looks like the answers",
        ),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "questions.jsonl").write_text(content)
    with pytest.raises(DocumentError, match=message):
        read_questions(tmp_path / "questions.jsonl")
