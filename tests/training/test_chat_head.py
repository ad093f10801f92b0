"""The scripts that let a chat model write for its head, and train that, on a tiny model."""

from __future__ import annotations

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec import Engine
from ragspec.drafters.heads.files import open_head
from ragspec.training.batches import StateReader
from ragspec.verification.causal import CausalTarget
from tests.support import tiny


@pytest.fixture
def scripts(training_path: None) -> tuple[Any, Any]:
    return importlib.import_module("chat_answers"), importlib.import_module("chat_head")


def test_a_users_words_stand_between_the_parts_of_a_turn(scripts: tuple[Any, Any]) -> None:
    assert scripts[0].turn_parts(tiny.tokenizer(chat=True)) == ("<user> ", "\n<assistant> ")


def test_passages_are_permissive_and_cut_at_paragraphs(
    scripts: tuple[Any, Any], places: tuple[Path, Path]
) -> None:
    documents = scripts[0].read_documents(places[0])
    prompts = scripts[0].passage_prompts(documents, 20, random.Random(1))
    assert len(prompts) == 20
    assert not any("zzz" in prompt for prompt in prompts)
    paragraph = tiny.TEXT.split("\n\n")[0]
    long = [prompt for prompt in prompts if len(prompt) > 300]
    assert long
    assert all(paragraph in prompt for prompt in long)


def test_answers_that_loop_are_left_out(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(tiny.model(), tiny.tokenizer(chat=True), drafter=None)
    parts = scripts[0].turn_parts(engine.tokenizer)
    monkeypatch.setattr(scripts[0], "NEW_TOKENS", 8)
    instance = list(scripts[0].answered(engine, ["What is it?", "Why?"], parts))
    for record, prompt in zip(instance, ["What is it?", "Why?"], strict=True):
        before = engine.tokenizer.decode(record["ids"][: record["start"]])
        assert before == f"<user> {prompt}\n<assistant> "
        assert 0 < len(record["ids"]) - record["start"] <= 8
    monkeypatch.setattr(scripts[0], "repeats", lambda tokens: True)
    assert not list(scripts[0].answered(engine, ["What is it?"], parts))


def test_a_head_is_trained_in_two_stages_and_goes_on_where_it_was_left(
    scripts: tuple[Any, Any],
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared, model = places
    answers = tmp_path / "answers.jsonl"
    rows = [{"ids": tiny.prompt(30, seed=i), "start": 8} for i in range(24)]
    answers.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    work, out = tmp_path / "work", tmp_path / "head"
    template = f"--shared {shared} --answers {answers} --work {work} --out {out} --model {model}"
    more = "--dtype float32 --passages 6 --vocabulary 20 --depth 2 --minutes 0.002 0.002"
    monkeypatch.setattr("sys.argv", ["chat_head.py", *template.split(), *more.split()])
    scripts[1].main()
    written = capsys.readouterr().out.splitlines()
    stages = [json.loads(line) for line in written if line.startswith("{")]
    assert [(each["out"], each["texts"]) for each in stages] == [("first", 28), ("second", 28)]
    head = open_head(out)
    assert head.config.draft_vocab_size == 20 and not head.config.has_output
    weights = open_head(work / "second").fc.weight
    assert torch.equal(head.fc.weight, weights.bfloat16().float())
    scripts[1].main()  # both are done
    assert not capsys.readouterr().out


def test_stored_states_are_those_of_the_model(
    training_path: None, places: tuple[Path, Path], tmp_path: Path
) -> None:
    module = importlib.import_module("stored_states")
    target = CausalTarget(tiny.model(num_hidden_layers=4))
    texts = [module.Text(tiny.prompt(n, seed=n), 3) for n in (12, 7, 9)]
    module.store_states(target, texts, tmp_path, (1, 2))
    stored = module.StoredStates(target, tmp_path, (1, 2))
    read = stored.read([2, 0])
    expected = StateReader(target, [text.ids for text in stored.texts], (1, 2)).read([2, 0])
    assert read.inputs.shape[-1] == 2 * read.states.shape[-1]
    for ours, theirs in ((read.states, expected.states), (read.inputs, expected.inputs)):
        assert torch.allclose(ours, theirs, atol=2e-2)
    assert torch.equal(read.embedded, expected.embedded)
    assert read.real.sum(1).tolist() == [12 - 2, 7 - 2]


def test_a_line_that_a_kill_tore_is_cut_off(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    assert scripts[0].next_round(path) == 0
    path.write_text('{"text": "a", "round": 4}\n{"text": "b", "rou', encoding="utf-8")
    assert scripts[0].next_round(path) == 5
    assert path.read_text(encoding="utf-8") == '{"text": "a", "round": 4}\n'
    path.write_text('{"text"', encoding="utf-8")
    assert scripts[0].next_round(path) == 0
    assert path.read_text(encoding="utf-8") == ""
