"""The scripts that record answers of a chat model and train its draft head on them."""

import importlib
import json
import random
from pathlib import Path

import pytest
import torch

from ragspec import Engine
from ragspec.drafters.heads.files import open_head, save_head
from ragspec.sampling import stopping
from ragspec.training.batches import StateReader
from ragspec.verification.causal import CausalTarget
from tests.support import heads, tiny

module = importlib.import_module
pytestmark = pytest.mark.usefixtures("training_path")


def call(monkeypatch: pytest.MonkeyPatch, script: str, options: str) -> None:
    monkeypatch.setattr("sys.argv", [f"{script}.py", *options.split()])
    module(script).main()


def test_a_users_words_stand_between_the_parts_of_a_turn() -> None:
    parts = module("chat_answers").turn_parts(tiny.tokenizer(chat=True))
    assert parts == ("<user> ", "\n<assistant> ")


def test_passages_are_permissive_and_cut_at_paragraphs(places: tuple[Path, Path]) -> None:
    writer = module("chat_answers")
    documents = writer.read_documents(places[0])
    prompts = writer.passage_prompts(documents, 20, random.Random(1))
    assert len(prompts) == 20
    assert not any("zzz" in prompt for prompt in prompts)
    paragraph = tiny.TEXT.split("\n\n")[0]
    long = [prompt for prompt in prompts if len(prompt) > 300]
    assert long
    assert all(paragraph in prompt for prompt in long)


def test_answers_are_stored_with_their_states_up_to_a_repetition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writer, trainer = module("chat_answers"), module("chat_head")
    target = CausalTarget(tiny.model(num_hidden_layers=4))
    recorder = writer.StateRecorder((1, 2))
    engine = Engine(target, tiny.tokenizer(chat=True), recorder, budget=1)
    parts = writer.turn_parts(engine.tokenizer)
    monkeypatch.setattr(writer, "NEW_TOKENS", 8)
    monkeypatch.setattr(stopping, "repeats", lambda tokens: False)
    sessions = writer.answered(engine, recorder, ["What is it?", "Why?"], parts)
    path, width = tmp_path / "chats.jsonl", 3 * target.config.hidden_size
    writer.append_chats(path, sessions, 4)
    rows = [session.row()[0] for session in sessions]
    for row, prompt in zip(rows, ["What is it?", "Why?"], strict=True):
        before = f"<user> {prompt}\n<assistant> "
        assert before.endswith(engine.tokenizer.decode(row["ids"][: row["start"]]))
        assert 0 < len(row["ids"]) - row["start"] <= 8
    stored = trainer.StoredStates(target, trainer.read_chats(path, width, 1024))
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
    assert writer.next_round(path, width) == 5
    again = trainer.read_chats(path, width, 9)
    assert [chat.ids for chat in again] == [row["ids"][:9] for row in rows if row["start"] < 9]
    assert writer.next_round(tmp_path / "fresh.jsonl", width) == 0
    monkeypatch.setattr(stopping, "repeats", lambda tokens: True)
    assert not writer.answered(engine, recorder, ["What is it?"], parts)


def test_a_head_is_trained_in_two_stages_and_resumed(
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer, trainer = module("chat_answers"), module("chat_head")
    shared, model = places
    answers = tmp_path / "answers.jsonl"
    monkeypatch.setattr(writer, "repeats", lambda tokens: False)
    monkeypatch.setattr(writer, "NEW_TOKENS", 30)
    monkeypatch.setattr(trainer, "HELD_OUT", 5)
    template = f"--shared {shared} --out {answers} --model {model} --dtype float32 --minutes 0.0001"
    for _ in range(2):
        call(monkeypatch, "chat_answers", template)
    passages = tmp_path / "passages.jsonl"
    monkeypatch.setattr(writer, "READ", 3)
    read = f"{template.replace(str(answers), str(passages))} --passages"
    call(monkeypatch, "chat_answers", read)
    parts = [json.loads(line) for line in passages.read_text(encoding="utf-8").splitlines()]
    assert len(parts) == 3 and all(part["start"] == 1 < len(part["ids"]) for part in parts)
    lines = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    learned = sum(line["round"] == 0 and line["start"] < trainer.LONGEST for line in lines)
    assert "round 1" in capsys.readouterr().out and learned > 10
    work, out = tmp_path / "work", tmp_path / "head"
    learned += 3
    more = "--dtype float32 --vocabulary 20 --depth 2 --minutes 0.002 0.002 --work"
    template = (
        f"--answers {answers} --passages {passages} --out {out} --model {model} {more} {work}"
    )
    call(monkeypatch, "chat_head", template)
    written = capsys.readouterr().out.splitlines()
    stages = [json.loads(line) for line in written if line.startswith("{")]
    assert [(e["out"], e["texts"]) for e in stages] == [("first", learned), ("second", learned)]
    head = open_head(out)
    assert head.config.draft_vocab_size == 20 and not head.config.has_output
    weights = open_head(work / "second").fc.weight.detach()
    assert torch.allclose(head.fc.weight, weights, atol=0.01 * float(weights.abs().max()))
    trainer.main()  # both are done
    assert not capsys.readouterr().out


def test_questions_are_about_the_part(places: tuple[Path, Path]) -> None:
    writer = module("long_answers")
    chosen = random.Random(1)
    documents = writer.read_documents(places[0])
    assert [document.title for document in documents] == ["Drafting"]  # no share-alike text
    part = writer.cut_part(documents, chosen)
    assert part.text in documents[0].text
    request = writer.questions_over(part, chosen)
    assert len(request) <= writer.QUESTIONS
    assert sum(question in writer.WHOLE for question in request) >= writer.OVER_ALL - 1
    assert len(set(request)) > writer.OVER_ALL


def test_a_head_learns_from_answers_over_documents(
    places: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    writer, trainer = module("long_answers"), module("chat_head")
    shared, model = places
    answers, work, out = tmp_path / "long.jsonl", tmp_path / "work", tmp_path / "head"
    monkeypatch.setattr(writer, "PART", (600, 900))
    monkeypatch.setattr(writer, "QUESTIONS", 5)
    monkeypatch.setattr(writer, "NEW_TOKENS", 12)
    request = f"--shared {shared} --out {answers} --model {model} --dtype float32 --minutes 0.0001"
    for _ in range(2):
        call(monkeypatch, "long_answers", request)
    rounds = [json.loads(line)["round"] for line in answers.read_text().splitlines()]
    assert sorted(set(rounds)) == [0, 1] and len(rounds) > 6
    target = CausalTarget(tiny.model(max_position_embeddings=1 << 14))
    start = heads.fresh(target, form="eagle3")
    save_head(start, tmp_path / "start")
    monkeypatch.setattr(trainer, "HELD_OUT", 2)
    inputs = f"--answers {answers} --start {tmp_path / 'start'} --work {work} --model {model}"
    more = f"--out {out} --dtype float32 --minutes 0 0.01 --depth 2"
    call(monkeypatch, "chat_head", f"{inputs} {more}")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("{"))
    about = json.loads(line)
    assert (about["out"], about["texts"]) == ("second", rounds.count(0))
    assert not torch.equal(open_head(out).fc.weight, start.fc.weight)
