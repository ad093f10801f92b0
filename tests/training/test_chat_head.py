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
        assert record["text"].startswith(f"<user> {prompt}\n<assistant> ")
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
    chats = tmp_path / "chats.jsonl"
    rows = [{"text": "<user> Why?\n<assistant> " + tiny.TEXT[i : i + 60]} for i in range(24)]
    chats.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    work, out = tmp_path / "work", tmp_path / "head"
    template = f"--shared {shared} --chats {chats} --work {work} --out {out} --model {model}"
    more = "--dtype float32 --passages 6 --vocabulary 20 --depth 2 --minutes 0.002 0.002"
    monkeypatch.setattr("sys.argv", ["chat_head.py", *template.split(), *more.split()])
    scripts[1].main()
    stages = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [Path(instance["out"]).name for instance in stages] == ["first", "second"]
    assert [instance["texts"] for instance in stages] == [30, 24]
    head = open_head(out)
    assert head.config.draft_vocab_size == 20
    weights = open_head(work / "second").fc.weight
    assert torch.equal(head.fc.weight, weights.bfloat16().float())
    scripts[1].main()  # both are done
    assert not capsys.readouterr().out


def test_a_line_that_a_kill_tore_is_cut_off(scripts: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    assert scripts[0].next_round(path) == 0
    path.write_text('{"text": "a", "round": 4}\n{"text": "b", "rou', encoding="utf-8")
    assert scripts[0].next_round(path) == 5
    assert path.read_text(encoding="utf-8") == '{"text": "a", "round": 4}\n'
    path.write_text('{"text"', encoding="utf-8")
    assert scripts[0].next_round(path) == 0
    assert path.read_text(encoding="utf-8") == ""
