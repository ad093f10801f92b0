"""The scripts that make long answers for a head, and train it on them, on a tiny model."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec.drafters.heads.files import open_head, save_head
from ragspec.training.trainer import HeadTraining
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny


@pytest.fixture
def scripts(training_path: None) -> tuple[Any, Any]:
    return importlib.import_module("long_answers"), importlib.import_module("long_head")


def test_pairs_are_those_of_a_heads_cache(scripts: tuple[Any, Any]) -> None:
    """Two chunks, then question and answer: tokens are numbered, states are their numbers."""

    def states(start: int, end: int) -> tuple[int, torch.Tensor]:
        return start, torch.arange(start, end, dtype=torch.float32)[:, None]

    instance = scripts[1].paired(
        [100 + n for n in range(20)], [states(2, 5), states(8, 10), states(12, 20)], 15
    )
    pairs = list(zip(instance.tokens[1:].tolist(), instance.states[:-1, 0].tolist(), strict=True))
    expected = [2, 3, 4, 8, 9, *range(12, 19)]
    assert pairs == [(100 + n + 1, float(n)) for n in expected]
    assert instance.places[1:].tolist() == [n + 1 for n in expected]
    assert instance.tokens[instance.learned] == 115  # the answer's first token
    alone = scripts[1].without_chunks(instance)
    assert alone.tokens[1:].tolist() == [100 + n for n in range(13, 20)]
    assert alone.states[:-1, 0].tolist() == [float(n) for n in range(12, 19)]
    assert alone.tokens[alone.learned] == 115


def test_a_reader_of_whole_texts_gives_what_the_target_gives(scripts: tuple[Any, Any]) -> None:
    """Trained on pairs of whole texts a head is the one that reading the texts would give."""
    target = CausalTarget(heads.model(torch.float32))
    texts = [tiny.prompt(12, vocab_size=heads.VOCAB, seed=seed) for seed in range(6)]
    answers = [scripts[1].paired(text, [(0, heads.states(target, text)[0])], 1) for text in texts]
    settings = HeadTraining(steps=3, batch_size=2, length=12, depth=2)
    trainer = scripts[1].HeadTrainer(
        target, texts, settings, reader=scripts[1].AnswerReader(target, answers)
    )
    assert len(list(trainer.run())) == 3
    expected = heads.train_head(target, texts, settings)
    torch.testing.assert_close(trainer.head.fc.weight, expected.fc.weight)


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
    records = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [record["round"] for record in records] == [0, 1]
    assert all(chat["answer"] for record in records for chat in record["chats"])
    start = heads.fresh(CausalTarget(tiny.model(max_position_embeddings=1 << 14)))
    save_head(start, tmp_path / "start")
    inputs = f"--answers {answers} --start {tmp_path / 'start'} --work {work} --model {model}"
    for last in ("", f"--out {out} --minutes 0.01 --depth 2"):
        monkeypatch.setattr(
            "sys.argv", ["long_head.py", *inputs.split(), "--dtype", "float32", *last.split()]
        )
        scripts[1].main()
        message = capsys.readouterr().out
        assert message.count("answers\n") == (0 if last else 2)  # read once
    assert "before:" in message
    assert not torch.equal(open_head(out).fc.weight, start.fc.weight)
