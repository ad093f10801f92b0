"""The scripts that make long answers for a head, and train it on them, on a tiny model."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.heads.files import open_head, save_head
from ragspec.drafters.heads.fresh import fresh_head
from ragspec.verification.causal import CausalTarget
from tests.support import tiny


@pytest.fixture
def scripts(training_path: None) -> tuple[Any, Any]:
    return importlib.import_module("long_answers"), importlib.import_module("chat_head")


def test_questions_are_about_the_part(scripts: tuple[Any, Any], places: tuple[Path, Path]) -> None:
    chosen = random.Random(1)
    documents = scripts[0].read_documents(places[0])
    assert [document.title for document in documents] == ["Drafting"]  # no share-alike text
    part = scripts[0].cut_part(documents, chosen)
    assert part.text in documents[0].text
    request = scripts[0].questions_over(part, chosen)
    assert len(request) <= scripts[0].QUESTIONS
    assert sum(question in scripts[0].WHOLE for question in request) >= scripts[0].OVER_ALL - 1
    assert len(set(request)) > scripts[0].OVER_ALL


def test_a_head_learns_from_answers_over_documents(
    scripts: tuple[Any, Any],
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared, model = places
    answers, work, out = tmp_path / "long.jsonl", tmp_path / "work", tmp_path / "head"
    monkeypatch.setattr(scripts[0], "PART", (600, 900))
    monkeypatch.setattr(scripts[0], "QUESTIONS", 5)
    monkeypatch.setattr(scripts[0], "NEW_TOKENS", 12)
    request = f"--shared {shared} --out {answers} --model {model} --dtype float32 --minutes 0.0001"
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["long_answers.py", *request.split()])
        scripts[0].main()
    rounds = [json.loads(line)["round"] for line in answers.read_text().splitlines()]
    assert sorted(set(rounds)) == [0, 1] and len(rounds) > 6
    start = fresh_head(
        CausalTarget(tiny.model(max_position_embeddings=1 << 14)),
        torch.Generator().manual_seed(0),
        form="eagle3",
    )
    save_head(start, tmp_path / "start")
    monkeypatch.setattr(scripts[1], "HELD_OUT", 2)
    inputs = f"--answers {answers} --start {tmp_path / 'start'} --work {work} --model {model}"
    more = f"--out {out} --dtype float32 --minutes 0 0.01 --depth 2"
    monkeypatch.setattr("sys.argv", ["chat_head.py", *inputs.split(), *more.split()])
    scripts[1].main()
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    about = json.loads(line)
    assert (about["out"], about["texts"]) == ("second", rounds.count(0))
    assert not torch.equal(open_head(out).fc.weight, start.fc.weight)
