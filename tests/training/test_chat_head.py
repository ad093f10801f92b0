"""The scripts that let a chat model write for its head, and train that, on a tiny model."""

import importlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from ragspec import Engine
from ragspec.drafters.heads.files import open_head
from ragspec.sampling import stopping
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


def test_answers_are_kept_with_their_states_up_to_a_repetition(
    scripts: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module, target = scripts[0], CausalTarget(tiny.model(num_hidden_layers=4))
    recorder = module.StateRecorder((1, 2))
    engine = Engine(target, tiny.tokenizer(chat=True), recorder, budget=1)
    parts = module.turn_parts(engine.tokenizer)
    monkeypatch.setattr(module, "NEW_TOKENS", 8)
    monkeypatch.setattr(stopping, "repeats", lambda tokens: False)
    sessions = module.answered(engine, recorder, ["What is it?", "Why?"], parts)
    path, width = tmp_path / "chats.jsonl", 3 * target.config.hidden_size
    module.append_chats(path, sessions, 4)
    rows = [session.row()[0] for session in sessions]
    for row, prompt in zip(rows, ["What is it?", "Why?"], strict=True):
        before = f"<user> {prompt}\n<assistant> "
        assert before.endswith(engine.tokenizer.decode(row["ids"][: row["start"]]))
        assert 0 < len(row["ids"]) - row["start"] <= 8
    stored = scripts[1].StoredStates(target, scripts[1].read_chats(path, width, 1024))
    read = stored.read([1, 0])
    expected = StateReader(target, [row["ids"] for row in rows], (1, 2)).read([1, 0])
    assert read.taps.shape[-1] == 2 * read.states.shape[-1]
    for ours, theirs in ((read.states, expected.states), (read.taps, expected.taps)):
        assert torch.allclose(ours[read.real], theirs[read.real], atol=2e-2)
    assert torch.equal(read.embedded, expected.embedded)
    assert read.real.sum(1).tolist() == [len(row["ids"]) - row["start"] + 1 for row in rows[::-1]]
    with path.open("a", encoding="utf-8") as stream:
        stream.write('{"ids": [1], "sta')
    path.with_suffix(".bin").open("ab").write(b"torn")
    assert module.next_round(path, width) == 5
    again = scripts[1].read_chats(path, width, 9)
    assert [chat.ids for chat in again] == [row["ids"][:9] for row in rows if row["start"] < 9]
    assert scripts[0].next_round(tmp_path / "fresh.jsonl", width) == 0
    monkeypatch.setattr(stopping, "repeats", lambda tokens: True)
    assert not module.answered(engine, recorder, ["What is it?"], parts)


def test_a_head_is_trained_in_two_stages_and_goes_on_where_it_was_left(
    scripts: tuple[Any, Any],
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared, model = places
    answers = tmp_path / "answers.jsonl"
    monkeypatch.setattr(scripts[0], "repeats", lambda tokens: False)
    monkeypatch.setattr(scripts[0], "NEW_TOKENS", 30)
    monkeypatch.setattr(scripts[1], "HELD_OUT", 5)
    template = f"--shared {shared} --out {answers} --model {model} --dtype float32 --minutes 0.0001"
    for _ in range(2):
        monkeypatch.setattr("sys.argv", ["chat_answers.py", *template.split()])
        scripts[0].main()
    passages = tmp_path / "passages.jsonl"
    monkeypatch.setattr(scripts[0], "READ", 3)
    read = f"{template.replace(str(answers), str(passages))} --passages"
    monkeypatch.setattr("sys.argv", ["chat_answers.py", *read.split()])
    scripts[0].main()
    parts = [json.loads(line) for line in passages.read_text(encoding="utf-8").splitlines()]
    assert len(parts) == 3 and all(part["start"] == 1 < len(part["ids"]) for part in parts)
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    learned = sum(line["round"] == 0 and line["start"] < scripts[1].LONGEST for line in lines)
    assert "round 1" in capsys.readouterr().out and learned > 10
    work, out = tmp_path / "work", tmp_path / "head"
    learned += 3
    template = (
        f"--answers {answers} --passages {passages} --work {work} --out {out} --model {model}"
    )
    more = "--dtype float32 --vocabulary 20 --depth 2 --minutes 0.002 0.002"
    monkeypatch.setattr("sys.argv", ["chat_head.py", *template.split(), *more.split()])
    scripts[1].main()
    written = capsys.readouterr().out.splitlines()
    stages = [json.loads(line) for line in written if line.startswith("{")]
    assert [(e["out"], e["texts"]) for e in stages] == [("first", learned), ("second", learned)]
    head = open_head(out)
    assert head.config.draft_vocab_size == 20 and not head.config.has_output
    weights = open_head(work / "second").fc.weight.detach()
    assert torch.allclose(head.fc.weight, weights, atol=0.01 * float(weights.abs().max()))
    scripts[1].main()  # both are done
    assert not capsys.readouterr().out
