"""The work behind `ragspec train-head`, beyond what its command line shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ragspec.drafters.eagle.training import HeadTraining
from ragspec.errors import InputError
from ragspec.pipelines.cli.train_head_run import check_out, make_head
from ragspec.pipelines.console.terminal import Terminal
from tests.support import image_models, tiny


def test_a_new_or_empty_folder_will_do(tmp_path: Path) -> None:
    check_out(tmp_path)
    check_out(tmp_path / "new")
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match="other files"):
        check_out(tmp_path)


def test_some_texts_are_kept_apart_where_there_are_many(tmp_path: Path) -> None:
    """And texts that the model could not read at once are cut to its context."""
    model, data = tmp_path / "model", tmp_path / "rows.jsonl"
    tiny.model(max_position_embeddings=40).save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    rows = ['{"text": "' + tiny.TEXT[i : i + 60].replace("\n", " ") + '"}' for i in range(45)]
    data.write_text("\n".join(rows), encoding="utf-8")
    settings = HeadTraining(steps=2, batch_size=2, length=64)
    found = make_head(str(model), data, tmp_path / "head", settings, Terminal(quiet=True))
    assert (found["texts"], found["kept_apart"], found["tokens"]) == (45, 3, 45 * 40)


def test_a_training_that_ends_before_its_first_step_writes_nothing(tmp_path: Path) -> None:
    model, data = tmp_path / "model", tmp_path / "text.txt"
    tiny.model().save_pretrained(model)
    tiny.tokenizer().save_pretrained(model)
    data.write_text(tiny.TEXT[:300], encoding="utf-8")
    settings = HeadTraining(steps=2, batch_size=2, length=32, seconds=1e-12)
    with pytest.raises(InputError, match="before its first step"):
        make_head(str(model), data, tmp_path / "head", settings, Terminal(quiet=True))
    assert not (tmp_path / "head").exists()


def test_pictures_are_read_whole_whatever_the_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A piece without its condition would be read at the condition's place."""
    from ragspec.drafters.eagle import training as head_training

    model, data = tmp_path / "model", tmp_path / "codes.npz"
    image_models.model("class").save_pretrained(model)
    codes = np.random.default_rng(3).integers(0, image_models.BOOK, (6, 16))
    np.savez(data, codes=codes, labels=np.arange(6) % 3)
    read, seen = head_training.read_states, list[list[int]]()

    def spy(target: Any, texts: Any) -> Any:
        seen.extend(texts)
        return read(target, texts)

    monkeypatch.setattr(head_training, "read_states", spy)
    settings = HeadTraining(steps=3, batch_size=2, length=8)
    make_head(str(model), data, tmp_path / "head", settings, Terminal(quiet=True))
    assert len(seen) == 3 * 2 + 6
    assert all(len(text) == 17 and text[0] >= image_models.BOOK for text in seen)
