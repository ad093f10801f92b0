"""`ragspec train-head`: heads of texts and codes, interrupted trainings, and refused input."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import SafetensorError

from ragspec import Engine, load_model
from ragspec.drafters.heads.drafter import HeadDrafter
from ragspec.drafters.heads.files import open_head, save_head
from ragspec.errors import InputError, ModelError, StoreError
from ragspec.pipelines.cli.train_head import HeadOptions, train_from_files
from ragspec.pipelines.console import terminal
from ragspec.pipelines.console.options import PlaceOptions
from ragspec.pipelines.console.terminal import Terminal
from ragspec.storage.filesystem import LOCK
from ragspec.training import run as train_head_run
from ragspec.training.batches import StateReader
from ragspec.training.files import CHECKPOINT, check_out, lock_out
from ragspec.training.trainer import HeadTrainer, HeadTraining
from ragspec.verification.causal import CausalTarget
from ragspec.visual.families.llamagen import LlamaGen
from tests.support import heads, image_models, published_heads, tiny
from tests.support.calls import noted
from tests.support.command_line import Capture, output_of, run
from tests.support.damage import full_disk

Files = tuple[str, Path]
QUIET = Terminal(quiet=True)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.txt").write_text(tiny.TEXT[number * 50 :][:300], encoding="utf-8")
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def train(
    model: str, data: Path, out: Path, settings: HeadTraining, log: Terminal = QUIET, **more: Any
) -> dict[str, Any]:
    return train_from_files(
        HeadOptions(PlaceOptions(), data, out, model, replace=True, **more), log, settings
    )


def small(model: str | Path, data: Path, out: Path, *more: str) -> list[str]:
    command = ["train-head", "--data", str(data), "--out", str(out), "--model", str(model)]
    return [*command, "--steps", "4", "-s", "batch=2", "-s", "length=32", *more]


def test_a_head_of_texts_drafts(model: str, texts: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "head"
    figures = run(capsys, *small(model, texts, out))
    assert figures["steps"] == 4
    assert figures["texts"] == 3
    loaded, tokenizer = load_model(model)
    tokens = torch.tensor(tokenizer([tiny.TEXT[n : n + 32] for n in (0, 50, 100)])["input_ids"])
    states, head = loaded.model(tokens).last_hidden_state.bfloat16().float(), open_head(out)
    read = head(loaded.model.embed_tokens(tokens)[:, 1:], head.project(states[:, :-1])).read
    ours, theirs = (loaded.lm_head(each).argmax(-1) for each in (read, states[:, 1:]))
    assert figures["agreement"] == round(float((ours == theirs).float().mean()), 4) > 0.0
    engine = Engine(loaded, drafter=HeadDrafter(out, loaded, min_expected_gain=0.0), budget=4)
    result = engine.generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    plain = Engine(loaded, drafter=None).generate([1, 2, 3], max_new_tokens=8, ignore_eos=True)
    assert result.tokens == plain.tokens
    assert any(len(step.tree) for step in result.steps)


def test_progress_replace_and_max_tokens(
    model: str, texts: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "LOG_SECONDS", 0.0)
    printed, err = output_of(capsys, *small(model, texts, tmp_path / "head"))
    assert "after 4 steps" in printed and "on training texts the head's" in printed
    assert "loss" in err
    assert "25%, step 1:" in err and "100%, step 4:" in err and "step 0:" not in err
    again = small(model, texts, tmp_path / "head", "--minutes", "0.001")
    assert "a head already" in output_of(capsys, *again, code=2).err
    assert run(capsys, *again, "--replace", "--max-tokens", "40")["tokens"] == 40


def pictures(folder: Path, count: int) -> tuple[Path, Path]:
    """Write an image model and codes of pictures; return the folder and the file."""
    image_models.model("class").save_pretrained(folder / "model")
    codes = np.random.default_rng(3).integers(0, image_models.BOOK, (count, 16))
    np.savez(folder / "codes.npz", codes=codes, labels=np.arange(count) % 3)
    return folder / "model", folder / "codes.npz"


def test_a_head_of_codes(tmp_path: Path, capsys: Capture) -> None:
    folder, data = pictures(tmp_path, 24)
    out = tmp_path / "head"
    result = run(capsys, *small(folder, data, out, "--seed", str(-(1 << 63))))
    assert (result["texts"], result["tokens"], result["held_out"]) == (24, 24 * 17, 2)
    err = output_of(capsys, *small(folder, data, tmp_path / "m", "-s", "form=medusa")).err
    assert "a head of medusa drafts without guidance: use --guidance 1" in err
    instance = HeadDrafter(out, image_models.target(LlamaGen.load_model(folder), 3.0))
    assert instance.head.config.vocab_size == image_models.BOOK
    err = output_of(capsys, *small(folder, data, tmp_path / "h", "--max-tokens", "9"), code=2).err
    assert "got max_tokens for pictures; expected texts" in err


def test_a_column_of_the_rows_is_read(model: str, tmp_path: Path, capsys: Capture) -> None:
    row = {"a": "x", "b": tiny.TEXT[:300], "messages": [{"role": "user", "content": "hi"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    command = small(model, tmp_path / "rows.jsonl", tmp_path / "head", "-s")
    assert run(capsys, *command, "field=b")["tokens"] > 30
    err = output_of(capsys, *command, "field=messages", "--replace", code=2).err
    assert "line 1 holds list; expected text or token ids: set field=." in err


def test_a_text_that_is_too_short_is_refused(model: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "short.txt").write_text("a", encoding="utf-8")
    command = small(model, tmp_path / "short.txt", tmp_path / "head")
    printed, err = output_of(capsys, *command, code=2)
    assert printed == "" and "expected text to learn from" in " ".join(err.split())


def test_a_model_in_out_is_not_replaced(tmp_path: Path) -> None:
    save_head(heads.fresh(CausalTarget(heads.model())), tmp_path / "head")
    check_out(tmp_path / "head")
    tiny.model().save_pretrained(tmp_path / "model")
    config, weights = published_heads.medusa("medusa_head.")  # inside its model
    whole = weights | {"model.norm.weight": torch.ones(published_heads.H)}
    published_heads.write(tmp_path / "whole", config, whole)
    for name in ("model", "whole"):
        with pytest.raises(InputError, match="other files"):
            check_out(tmp_path / name)


def test_many_texts_hold_some_out_and_long_ones_are_split(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    tiny.save(model, max_position_embeddings=40)
    rows = ['{"text": "' + tiny.TEXT[i : i + 60].replace("\n", " ") + '"}' for i in range(45)]
    data.write_text("\n".join(rows), encoding="utf-8")
    settings = HeadTraining(steps=2, batch_size=2, length=64)
    result = train(str(model), data, tmp_path / "head", settings)
    assert (result["texts"], result["held_out"], result["tokens"]) == (45, 3, 45 * 60)


def test_a_training_takes_one_step_and_a_resumed_one_may_take_none(
    some: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasty = replace(SETTINGS, seconds=1e-12)
    assert train(*some, tmp_path / "hasty", hasty)["steps"] == 1
    for name in ("parts", "fewer"):
        with monkeypatch.context() as patch:
            stopped_at(3, patch, lambda: os.kill(os.getpid(), signal.SIGINT))
            with pytest.raises(KeyboardInterrupt):
                train(*some, tmp_path / name, SETTINGS)
    over = train(*some, tmp_path / "parts", replace(SETTINGS, steps=3), resume=True)
    assert over["steps"] == 3
    assert over["loss"] is None
    assert sorted(path.name for path in (tmp_path / "parts").iterdir()) == WRITTEN
    for steps in (2, 1, 12):  # fewer steps than before do not remove any
        settings = replace(SETTINGS, steps=steps)
        over = train(*some, tmp_path / "fewer", settings, resume=True)
        assert over["steps"] == max(3, steps)
    with pytest.raises(StoreError, match=r"--start .*fewer learns on from its head"):
        train(*some, tmp_path / "fewer", SETTINGS, resume=True)
    assert train(*some, tmp_path / "fewer", SETTINGS, start=tmp_path / "fewer")["steps"] == 12


def test_pictures_are_not_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first code of a part would be read as its condition."""
    model, data = pictures(tmp_path, 6)
    known = list[Any]()
    read = noted(StateReader.read, known, lambda self, numbers: [self.chunks[n] for n in numbers])
    monkeypatch.setattr(StateReader, "read", read)
    settings = HeadTraining(steps=3, batch_size=2, length=8)
    train(str(model), data, tmp_path / "head", settings)
    texts = [text for each in known for text in each]
    assert len(texts) == 3 * 2 + 6
    assert all(len(text) == 17 and text[0] >= image_models.BOOK for text in texts)


@pytest.fixture
def some(tmp_path: Path) -> Files:
    rows = [json.dumps({"text": tiny.TEXT[i : i + 60]}) for i in range(0, 120, 3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return tiny.save(tmp_path / "model"), tmp_path / "rows.jsonl"


WRITTEN = ["config.json", "model.safetensors"]
SETTINGS = HeadTraining(steps=12, batch_size=4, length=32, learning_rate=1e-2)
ENOUGH = replace(SETTINGS, steps=30)


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    """Call `how` after a step of the training."""
    take = HeadTrainer._step

    def taken(self: HeadTrainer, rate: float) -> tuple[float, float]:
        result = take(self, rate)
        if self.steps + 1 == step:
            how()
        return result

    monkeypatch.setattr(HeadTrainer, "_step", taken)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_resumed_training_ends_with_the_same_loss(
    some: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: int, capsys: Capture
) -> None:
    whole = train(*some, tmp_path / "whole", ENOUGH)
    with monkeypatch.context() as patch:
        stopped_at(5, patch, lambda: os.kill(os.getpid(), how))
        with pytest.raises(KeyboardInterrupt):
            train(*some, tmp_path / "parts", ENOUGH, Terminal())
    assert "stopped after step 5" in capsys.readouterr().err
    open_head(tmp_path / "parts")  # the head so far can be opened
    with pytest.raises(InputError, match="a training that was left; expected --resume"):
        train(*some, tmp_path / "parts", ENOUGH)
    with pytest.raises(InputError, match="differs in batch_size, seed"):
        other = replace(ENOUGH, batch_size=2, seed=4)
        train(*some, tmp_path / "parts", other, resume=True)
    parts = train(*some, tmp_path / "parts", ENOUGH, resume=True)
    assert parts["steps"] == whole["steps"] == 30
    assert parts["loss"] == whole["loss"]
    assert not (tmp_path / "parts" / CHECKPOINT).exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_best_head_on_held_out_texts_is_written(
    some: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_head_run, "EVERY_SECONDS", 0.0)
    judged, heads = iter([0.1, 0.5, *[0.2] * 20]), []

    def judge(head: Any, *_: Any) -> float:
        heads.append({n: w.clone() for n, w in head.state_dict().items()})
        return next(judged)

    monkeypatch.setattr(train_head_run, "agreement", judge)
    monkeypatch.setattr(time, "monotonic", iter(range(0, 10**6, 100)).__next__)
    train(*some, tmp_path / "head", SETTINGS)
    written = open_head(tmp_path / "head").state_dict()
    assert len(heads) > 3
    assert all(torch.equal(written[name], weight) for name, weight in heads[1].items())


def test_texts_beyond_the_held_out_ones_are_learned(
    some: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Mock(wraps=HeadTrainer)
    monkeypatch.setattr(train_head_run, "MOST_HELD_OUT", 1)
    monkeypatch.setattr(train_head_run, "HeadTrainer", trainer)
    result = train(*some, tmp_path / "head", SETTINGS)
    assert len(trainer.call_args.args[1]) == result["texts"] - result["held_out"] == 39


def test_a_full_disk_does_not_lose_the_training(
    some: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(train_head_run, "EVERY_SECONDS", 0.0)
        patch.setattr(torch, "save", full_disk)
        result = train(*some, tmp_path / "head", SETTINGS, Terminal())
        assert result["steps"] == 12 and "No space left" in capsys.readouterr().err

    error = SafetensorError("I/O error: No space left on device (os error 28)")
    with monkeypatch.context() as patch:
        patch.setattr("safetensors.torch.save_file", Mock(side_effect=error))
        with pytest.raises(StoreError, match=r"disk with room\. --resume with the same"):
            train(*some, tmp_path / "other", SETTINGS)
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(StoreError, match=r"disk with room\.$"):  # no state to go on with
            train(*some, tmp_path / "third", SETTINGS)
    assert train(*some, tmp_path / "other", SETTINGS, resume=True)["steps"] == 12
    assert sorted(path.name for path in (tmp_path / "other").iterdir()) == WRITTEN
    with pytest.raises(StoreError, match="Expected an interrupted training"):
        train(*some, tmp_path / "head", SETTINGS, resume=True)
    (tmp_path / "empty").mkdir()
    for name in ("empty", "absent"):
        with pytest.raises(StoreError, match=r"Leave --resume out\. No head is there"):
            check_out(tmp_path / name, resume=True)
    (tmp_path / "head" / CHECKPOINT).write_bytes(b"nothing of the kind")
    with pytest.raises(StoreError, match=r"is damaged, or .* run code\)\. Delete it"):
        train(*some, tmp_path / "head", SETTINGS, resume=True)


def test_a_head_that_is_not_finite_is_not_written(some: Files, tmp_path: Path) -> None:
    train(*some, tmp_path / "head", SETTINGS)
    before = (tmp_path / "head" / WRITTEN[1]).read_bytes()
    with pytest.raises(InputError, match=r"loss of nan in step 2; .* Lower the learning rate"):
        train(*some, tmp_path / "head", replace(SETTINGS, learning_rate=1e12))
    with pytest.raises(ModelError, match="infinities or NaN"):
        train(*some, tmp_path / "head", replace(SETTINGS, steps=1, learning_rate=1e300))
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == WRITTEN
    assert (tmp_path / "head" / WRITTEN[1]).read_bytes() == before


def test_the_folder_is_locked_before_the_training(
    some: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two trainings into one folder would lose one of the heads."""
    settings = replace(SETTINGS, learning_rate=1e12)  # fails once it has begun
    with pytest.raises(InputError, match=rf"may write, got {some[1]}\. Name another for"):
        train(*some, some[1] / "x", settings)
    busy = pytest.raises(StoreError, match="head is being written by another process")
    with lock_out(tmp_path / "head"), busy:
        train(*some, tmp_path / "head", settings)
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr(train_head_run, "_read_states", lambda *_: signal.raise_signal(signal.SIGTERM))
        train(*some, tmp_path / "head", SETTINGS)
    assert not (tmp_path / "head").exists()
    (tmp_path / "head").mkdir()
    (tmp_path / "head" / LOCK).touch()  # left by a kill
    train(*some, tmp_path / "head", replace(SETTINGS, steps=1))
    assert sorted(path.name for path in (tmp_path / "head").iterdir()) == WRITTEN


def test_start_continues_from_another_head(some: Files, tmp_path: Path, capsys: Capture) -> None:
    still = replace(SETTINGS, steps=1, learning_rate=1e-9)
    first = train(*some, tmp_path / "first", replace(SETTINGS, draft_vocab_size=9))
    more = train(*some, tmp_path / "more", still, start=tmp_path / "first")
    assert more["agreement"] == first["agreement"]
    instance, before = (open_head(tmp_path / name) for name in ("more", "first"))
    torch.testing.assert_close(instance.fc.weight, before.fc.weight)
    assert instance.config.draft_vocab_size == 9
    options = ["--start", str(tmp_path / "first"), "-s", "form=eagle3"]
    err = output_of(capsys, *small(*some, tmp_path / "other", *options), code=2).err
    assert "got form='eagle3' for a head of eagle1" in " ".join(err.split())
